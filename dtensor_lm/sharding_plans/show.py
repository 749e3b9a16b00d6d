"""A Program as a readable table and as JSON-able data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dtensor_lm.edges import Collective
from dtensor_lm.layout import Layout
from dtensor_lm.sharding_plans.checks import generic
from dtensor_lm.sharding_plans.pipeline import Pipeline
from dtensor_lm.sharding_plans.program import Program


def bytes_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return ["  " + line.rstrip() for line in lines]


def _times(n: int) -> str:
    return f" x{n}" if n > 1 else ""


def _shape(layout: Layout) -> str:
    return "x".join(map(str, layout.local_shape())) or "1"


def table(p: Program) -> str:
    """Parameters, edges and collectives; equal rows of repeated layers stand once, with their number."""
    state = p.bytes_per_rank()
    total = sum(prod(x.storage.shape) for x in p.parameters.values())
    where = f"mesh {p.mesh} ({p.mesh.size} ranks)" if p.mesh.size > 1 else "one process"
    lines = [
        f"{type(p.model).__name__}, {total:,} parameters, on {where}, {p.dtype}",
        f"batch {p.batch} x {p.seq} tokens in {p.micro_batches} micro-batch" + "es" * (p.micro_batches > 1),
        "state per rank: "
        + ", ".join(f"{name} {bytes_text(n)}" for name, n in state.items())
        + (", on the pipeline rank with the most" if p.pipeline is not None else "")
        + " (without activations and gathered weights)",
        *(_pipeline(p.pipeline) if p.pipeline is not None else []),
        "",
        "parameters (layout, then local shape and bytes per rank)",
    ]
    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for x in p.parameters.values():
        later = [
            f"{t} {layout}"
            for t, layout, before in (
                ("gradients", x.gradients, x.storage),
                ("optimizer", x.optimizer, x.gradients),
            )
            if layout.dims != before.dims
        ]
        groups[
            generic(x.name),
            str(x.storage),
            _shape(x.storage),
            bytes_text(x.storage.local_bytes()),
            "decays" if x.decay else "",
            "; ".join(later),
        ] += 1
    lines += _table((name + _times(n), *rest) for (name, *rest), n in groups.items())
    states = "S cut, P addends, R equal with partial gradients, I equal"
    lines += ["", f"edges (state changes {states}; forward / backward)"]
    edges: dict[tuple[str, ...], int] = defaultdict(int)
    for e in p.edges:
        if e.steps:
            edges[
                generic(e.region) or "model",
                e.tensor,
                str(e.source),
                "->",
                str(e.target),
                "; ".join(map(str, e.steps)),
            ] += 1
    rows = [(region + _times(n), *rest) for (region, *rest), n in edges.items()]
    lines += _table(rows) if rows else ["  none"]
    for rank, collectives in enumerate(p.by_rank):
        where = f", {p.pipeline.axis} rank {rank}" if p.pipeline is not None and len(p.by_rank) > 1 else ""
        lines += ["", f"collectives per rank and step{where}", *_collectives(p, collectives)]
    return "\n".join(lines)


def _collectives(p: Program, collectives: tuple[Collective, ...]) -> list[str]:
    calls: dict[tuple[str, str, str, str, int], int] = defaultdict(int)
    for c in collectives:
        calls[c.phase, c.op, ".".join(c.axes), f"{generic(c.where)} ({c.dtype})", c.bytes] += c.count
    if not calls:
        return ["  none"]
    rows = [
        (phase, op, "@" + axes, f"{n} x", bytes_text(size), where)
        for (phase, op, axes, where, size), n in calls.items()
    ]
    wire = sum(c.wire_bytes(p.mesh) * c.count for c in collectives)
    count = sum(c.count for c in collectives)
    return [*_table(rows), f"  in all {count} collectives; each rank sends {bytes_text(wire)} in rings"]


def _pipeline(pipe: Pipeline) -> list[str]:
    """Stages, and what they hand over."""
    table = pipe.schedule
    runs = f", {pipe.accumulate} runs of it in a step" if pipe.accumulate > 1 else ""
    rank = "rank" + "s" * (table.ranks > 1)
    lines = ["", f"pipeline over {pipe.axis}: {table.name}, {table.stages} stages on {table.ranks} {rank}, "
                 f"{table.micro_batches} micro-batches{runs}"]  # fmt: skip
    total = sum(stage.cost for stage in pipe.stages) or 1.0
    rows = []
    for stage in pipe.stages:
        first, last = pipe.links[stage.first].unit, pipe.links[stage.stop - 1].unit
        rows.append((
            f"stage {stage.index}", f"{pipe.axis} rank {stage.rank}", f"{first} to {last}" if first != last else first,
            f"{stage.layers} layer{'s' * (stage.layers != 1)}", f"{stage.cost / total:.1%} of the cost",
        ))  # fmt: skip
    lines += _table(rows)
    borders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for b in pipe.boundaries:
        size = f"{b.count} x {bytes_text(b.layout.local_bytes())} and as much back"
        borders[b.tensor, str(b.layout), size, "" if b.sent else "on one rank: not sent"].append(b.stage)
    lines += _table(
        (f"stage {stages[0]} -> {stages[0] + 1}{_times(len(stages))}", *row) for row, stages in borders.items()
    )
    shared = {name: ranks for ranks, names in pipe.shared().items() for name in names}
    return lines + [f"  {name} is on {pipe.axis} ranks {', '.join(map(str, ranks))}: its gradients are added"
                    for name, ranks in shared.items()]  # fmt: skip


def prod(shape: Iterable[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def data(p: Program) -> dict[str, object]:
    return {
        "model": type(p.model).__name__,
        "mesh": dict(p.mesh.sizes),
        "plan": p.plan.as_dict(),
        "batch": p.batch,
        "seq": p.seq,
        "micro_batches": p.micro_batches,
        "dtype": p.dtype,
        "parameter_count": sum(prod(x.storage.shape) for x in p.parameters.values()),
        "bytes_per_rank": p.bytes_per_rank(),
        "parameters": [
            {
                "name": x.name,
                "dims": x.spec,
                "shape": list(x.storage.shape),
                "weight_decay": x.decay,
                **{t: getattr(x, t).as_dict() for t in ("gathered", "storage", "gradients", "optimizer")},
            }
            for x in p.parameters.values()
        ],
        "edges": [
            {
                "region": e.region,
                "tensor": e.tensor,
                "kind": e.kind,
                "from": e.source.as_dict(),
                "to": e.target.as_dict(),
                "crossings": e.count,
                "steps": [
                    {
                        "axes": list(s.axes),
                        "change": ">".join(s.change),
                        "dim": s.dim,
                        "other": s.other,
                        "forward": s.forward,
                        "backward": s.backward if e.grad else "nothing",
                    }
                    for s in e.steps
                ],
            }
            for e in p.edges
        ],
        "pipeline": None if p.pipeline is None else _pipeline_data(p.pipeline),
        "collectives": [
            {
                **({"pipeline_rank": rank} if p.pipeline is not None else {}),
                "phase": c.phase,
                "op": c.op,
                "axes": list(c.axes),
                "dtype": c.dtype,
                "bytes": c.bytes,
                "count": c.count,
                "where": c.where,
                "wire_bytes": c.wire_bytes(p.mesh),
            }
            for rank, collectives in enumerate(p.by_rank)
            for c in collectives
        ],
    }


def _pipeline_data(pipe: Pipeline) -> dict[str, object]:
    return {
        "axis": pipe.axis,
        "schedule": pipe.schedule.name,
        "rows": [[str(action) for action in row] for row in pipe.schedule.rows],
        "accumulate": pipe.accumulate,
        "stages": [
            {
                "index": stage.index,
                "rank": stage.rank,
                "layers": stage.layers,
                "units": [link.unit for link in pipe.links[stage.first : stage.stop]],
                "cost": stage.cost,
            }
            for stage in pipe.stages
        ],
        "boundaries": [
            {
                "from": b.stage,
                "to": b.stage + 1,
                "tensor": b.tensor,
                "layout": b.layout.as_dict(),
                "bytes": b.layout.local_bytes(),
                "crossings": b.count,
                "sent": b.sent,
            }
            for b in pipe.boundaries
        ],
        "shared_parameters": {name: list(ranks) for ranks, names in pipe.shared().items() for name in names},
    }
