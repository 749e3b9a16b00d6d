"""A Program as a readable table and as JSON-able data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dtensor_lm.layout import Layout
from dtensor_lm.sharding_plans.checks import generic
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
        + " (without activations and gathered weights)",
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
    lines += ["", "collectives per rank and step"]
    calls: dict[tuple[str, str, str, str, int], int] = defaultdict(int)
    for c in p.collectives:
        calls[c.phase, c.op, ".".join(c.axes), f"{generic(c.where)} ({c.dtype})", c.bytes] += c.count
    rows = [
        (phase, op, "@" + axes, f"{n} x", bytes_text(size), where)
        for (phase, op, axes, where, size), n in calls.items()
    ]
    lines += _table(rows) if rows else ["  none"]
    if rows:
        wire = sum(c.wire_bytes(p.mesh) * c.count for c in p.collectives)
        lines.append(
            f"  in all {sum(c.count for c in p.collectives)} collectives; each rank sends {bytes_text(wire)} in rings"
        )
    return "\n".join(lines)


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
        "collectives": [
            {
                "phase": c.phase,
                "op": c.op,
                "axes": list(c.axes),
                "dtype": c.dtype,
                "bytes": c.bytes,
                "count": c.count,
                "where": c.where,
                "wire_bytes": c.wire_bytes(p.mesh),
            }
            for c in p.collectives
        ],
    }
