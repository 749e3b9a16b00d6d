"""From an ordinary model to three meshes: what the names cost in lines, that they are right, that the losses agree.

    python experiments/bring_your_own/run.py [--steps 40] [--batch 8] [--seq 64]

Compares `plain.py` with `named.py`, checks the law of regions, then trains in float64 on the default corpus on one
device and on two meshes of four local processes. Ends with exit code 1 where signatures are not lawful, or where a loss
of a mesh differs from one device's by more than 1e-10 of it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import dtensor_lm as dl
from dtensor_lm.config import EvaluationConfig, SampleConfig, TrainConfig
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing import check_regions
from dtensor_lm.testing.workers import pool

HERE = Path(__file__).parent
MESHES = ("", "fsdp=2,tp=2", "dp=2,tp=2")
TOLERANCE = 1e-10


def changed_lines() -> tuple[int, int, int]:
    """Lines of code (not blank) of `plain.py`, and how many of them `named.py` adds and takes away."""
    plain, named = (
        [line for line in (HERE / f"{name}.py").read_text().splitlines() if line.strip()] for name in ("plain", "named")
    )
    marks = [line[0] for line in difflib.ndiff(plain, named)]
    return len(plain), marks.count("+"), marks.count("-")


def train(config: TrainConfig) -> None:
    from dtensor_lm.training.loop import run

    with contextlib.redirect_stdout(io.StringIO()):
        assert run(config) == 0


def losses(mesh: str, folder: Path, steps: int, batch: int, seq: int) -> list[float]:
    """The loss of every step."""
    config = TrainConfig(
        model="named:LanguageModel", mesh=mesh, steps=steps, batch=batch, seq=seq, dtype="float64", device="cpu",
        progress=False, run_dir=str(folder), evaluation=EvaluationConfig(every=0), sample=SampleConfig(tokens=0),
    )  # fmt: skip
    pool(Mesh.parse(mesh).size).run(train, config, timeout=600)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    args = parser.parse_args(arguments)
    sys.path.insert(0, str(HERE))  # workers get it too
    from named import LanguageModel

    before, added, removed = changed_lines()
    print(f"plain.py has {before} lines; named.py adds {added} and takes {removed} away")
    report = check_regions(dl.abstract(LanguageModel))
    print(report)
    worst, one = 0.0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for place, mesh in enumerate(MESHES):
            began = time.monotonic()
            found = losses(mesh, Path(folder, str(place)), args.steps, args.batch, args.seq)
            one = one or found
            worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(found, one, strict=True)))
            seconds = time.monotonic() - began
            print(f"{mesh or 'one device':12} loss {found[0]:.12f} -> {found[-1]:.12f}   {seconds:.0f} s")
    print(f"largest relative difference of a loss: {worst:.1e}")
    return 0 if report.ok and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
