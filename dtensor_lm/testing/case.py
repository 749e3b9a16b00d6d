"""One comparison with one device as data: a model, a plan, a mesh and a batch. Its text is a command that runs it.

python -m dtensor_lm.testing.case '{"model": "tiny", "mesh": "tp=2", "plan": {"compute": {"heads": "tp"}}}'
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_lm import models
from dtensor_lm.errors import ConfigError, UserError, nearest
from dtensor_lm.from_config import MOST_LOCAL_RANKS
from dtensor_lm.mesh import Mesh
from dtensor_lm.models.own import own
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.sharding_plans.resolve import resolve
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool

LABELS = ("all", "some", "rows", "start", "end", "one", "none")  # which labels are real


@dataclass(frozen=True)
class Case:
    """model: a name, or `module:function`; changes: its arguments. plan: the tables of `Plan.as_dict`.

    labels: which of them are real: all, some (each with probability 1/2), whole rows only (so that ranks and
    micro-batches have none), those of the start or end of sequences (so that
    ranks of a cut sequence have none), one, none.
    steps: of SGD and of AdamW; 0 compares loss, gradients, norm and collectives only.
    schedule, virtual_stages, accumulate: of a pipeline, as `resolve` takes them; '' and 0 leave them to it.
    """

    model: str = "tiny"
    changes: Mapping[str, Any] = field(default_factory=dict)
    mesh: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    seq: int = 8
    micro_batches: int = 1
    labels: str = "all"
    dtype: str = "float64"
    steps: int = 0
    seed: int = 0
    schedule: str = ""
    virtual_stages: int = 0
    accumulate: int = 1

    def command(self) -> str:
        """What runs this case again, from a shell."""
        default = Case()
        said = {f.name: value for f in dataclasses.fields(self)
                if (value := getattr(self, f.name)) != getattr(default, f.name)}  # fmt: skip
        plan = {table: rows for table, rows in said.pop("plan", {}).items() if rows not in ({}, [], True)}
        said |= {"plan": plan} if plan else {}
        return f"python -m dtensor_lm.testing.case {shlex.quote(json.dumps(said))}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads what `command` writes. Raises `ConfigError` with every fault."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"this case is not JSON: {error}") from error
        known = {f.name: type(getattr(cls(), f.name)) for f in dataclasses.fields(cls)}
        if not isinstance(data, dict):
            raise ConfigError(f"a case is a JSON object with {', '.join(known)}")
        faults = [f"unknown field {name!r}{nearest(name, known)}" for name in data if name not in known]
        faults += [
            f"{name}: {data[name]!r} is not a {kind.__name__}"
            for name, kind in known.items()
            if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool))
        ]
        least = {"batch": 1, "seq": 1, "micro_batches": 1, "steps": 0, "seed": 0, "virtual_stages": 0, "accumulate": 1}
        faults += [
            f"{name} is {data[name]}: from {low} to 2**31 - 1"
            for name, low in least.items()
            if type(data.get(name)) is int and not low <= data[name] < 2**31
        ]
        labels = data.get("labels", "all")
        if isinstance(labels, str) and labels not in LABELS:
            faults.append(f"labels: {labels!r}{nearest(labels, LABELS)}: use {', '.join(LABELS)}")
        if faults:
            raise ConfigError("this case cannot be read:", faults)
        return cls(**data)

    def build(self) -> nn.Module:
        """The model. Raises `ConfigError` where it cannot be built so."""
        if ":" in self.model:
            return own(self.model, self.changes)
        try:
            return models.build(self.model, **self.changes)
        except UserError:
            raise
        except Exception as error:  # whatever its code says of such sizes
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"model {self.model} cannot be built with {dict(self.changes)}: {what}") from error

    def program(self) -> Program:
        return _program(json.dumps(dataclasses.asdict(self)))


@functools.lru_cache(maxsize=2)  # a case is drawn, which resolves it, and then run
def _program(text: str) -> Program:
    case = Case(**json.loads(text))
    return resolve(
        case.build(), Plan.from_dict(case.plan), Mesh.parse(case.mesh),
        batch=case.batch, seq=case.seq, micro_batches=case.micro_batches, dtype=case.dtype,
        schedule=case.schedule or None, virtual_stages=case.virtual_stages or None, accumulate=case.accumulate,
    )  # fmt: skip


def batch_of(program: Program, labels: str, seed: int) -> dict[str, Tensor]:
    """Random tokens and labels of a whole step, of which those that `labels` says are real."""
    g = torch.Generator().manual_seed(seed)
    shape = (program.batch, program.seq)
    vocab = program.sizes["vocab"]
    tokens, targets = (torch.randint(0, vocab, shape, generator=g) for _ in range(2))
    real = torch.zeros(shape, dtype=torch.bool)
    if labels == "all":
        real[:] = True
    elif labels == "some":
        real = torch.rand(shape, generator=g) < 0.5
    elif labels == "rows":
        real[torch.rand(shape[0], generator=g) < 0.5] = True
    elif labels == "start":
        real[:, : max(1, shape[1] // 3)] = True
    elif labels == "end":
        real[:, -max(1, shape[1] // 3) :] = True
    elif labels == "one":
        real.view(-1)[int(torch.randint(0, real.numel(), (), generator=g))] = True
    return {"tokens": tokens, "labels": targets.where(real, IGNORE)}


def run(case: Case, timeout: float = 60.0) -> Report:
    """Compares on local gloo ranks. Raises `UserError` where the case does not resolve, or has too many ranks."""
    program = case.program()
    if program.mesh.size > MOST_LOCAL_RANKS:
        raise ConfigError(f"mesh {program.mesh} has {program.mesh.size} ranks: at most {MOST_LOCAL_RANKS} start here")
    return pool(program.mesh.size).run(_compare, program, case, timeout=timeout)[0]


def _compare(program: Program, case: Case) -> Report:
    batches = [batch_of(program, case.labels, case.seed + i) for i in range(max(case.steps, 1))]
    return compare(program, seed=case.seed, steps=case.steps, batches=batches)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    try:
        case = Case.parse(arguments[0])
        report = run(case)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"{name:22} {value}" for name, value in report.as_dict().items()))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
