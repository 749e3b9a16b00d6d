"""Wrong signatures of every region of a model, made from the right ones: a name too many, a name too few, a name left
out of a sum.

A fault belongs to the region in whose names the tensor is written: what a region inside takes and gives has its outer
side in the names of the region around it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from dtensor_lm.region import Crossing, Region, TensorSpec, is_region, signature

Kind = Literal["a cut too many", "a sum too many", "a name removed", "left out of the sum"]


@dataclass(frozen=True)
class Place:
    """Where a text stands in a signature. tensor: as reports call it, seen from the region that is checked."""

    module: str  # whose signature
    table: str  # inputs, outputs or params
    key: str | int
    side: str
    tensor: str


@dataclass(frozen=True)
class Fault:
    """region: the one whose law it breaks; name: the dim that it is about."""

    region: str
    kind: Kind
    name: str
    place: Place
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.region or 'the model'}: {self.place.tensor or 'cuts'}: {self.kind}: {self.name}"

    def plant(self, model: nn.Module) -> None:
        """Gives the module a signature of its own, with the fault."""
        module = model.get_submodule(self.place.module)
        region = copy.copy(signature(module))
        if self.kind == "a cut too many":
            region.cuts = region.cuts | {frozenset([self.name])}
        else:
            _put(region, self.place, self.spec)
        module.region = region


def _put(region: Region, place: Place, spec: TensorSpec) -> None:
    if place.table == "params":
        region.params = {**region.params, place.key: spec}
    elif place.table == "inputs":
        region.inputs = {**region.inputs, place.key: replace(region.inputs[place.key], **{place.side: spec})}
    else:
        outputs = list(region.outputs)
        outputs[place.key] = replace(outputs[place.key], **{place.side: spec})
        region.outputs = tuple(outputs)


def regions(model: nn.Module) -> dict[str, Region]:
    return {path: signature(m) for path, m in model.named_modules() if is_region(m)}


def places(model: nn.Module, path: str) -> Iterator[tuple[Place, TensorSpec]]:
    """Every tensor that is written in the names of the region at `path`."""
    known = regions(model)
    region = known[path]
    yield from _crossings(path, region.inputs, region.outputs, "inner", "")
    for name, spec in region.params.items():
        yield Place(path, "params", name, "", name), spec
    for inside in known:
        parents = [p for p in known if p != inside and (not p or inside.startswith(f"{p}."))]
        if inside and max(parents, key=len) == path:
            below = inside.removeprefix(f"{path}." if path else "")
            prefix = f"inner {below}"
            yield from _crossings(inside, known[inside].inputs, known[inside].outputs, "outer", prefix)


def _crossings(
    path: str, inputs: dict[str, Crossing], outputs: tuple[Crossing, ...], side: str, prefix: str
) -> Iterator[tuple[Place, TensorSpec]]:
    for name, crossing in inputs.items():
        if crossing.inner.kind in ("float", "int"):
            label = f"{prefix}.{name}" if prefix else name
            yield Place(path, "inputs", name, side, label), getattr(crossing, side)
    for i, crossing in enumerate(outputs):
        yield Place(path, "outputs", i, side, f"{prefix} output {i}".strip()), getattr(crossing, side)


def faults(model: nn.Module, path: str, lawful: set[str]) -> list[Fault]:
    """The faults of one region: of tensors that are written alike only of one, of sums too many one per tensor.

    lawful: names that may be cut beyond `cuts`.
    """
    region = regions(model)[path]
    cuts = {name for cut in region.cuts for name in cut}
    alone = {name for cut in region.cuts for name in cut if len(cut) == 1}
    every = list({(p.module, p.table, p.side, str(spec)): (p, spec) for p, spec in places(model, path)}.values())
    first = {dim[0] for _, spec in every for dim in spec.dims if spec.kind == "float"} - {"_"}
    inner = {name for _, spec in every for dim in spec.dims for name in dim[1:]}
    here = Place(path, "cuts", "", "", "")
    found = [Fault(path, "a cut too many", n, here, TensorSpec(())) for n in sorted(first - inner - cuts - lawful)]
    for turn, (place, spec) in enumerate(every):
        for i, dim in enumerate(spec.dims):
            if dim[0] in cuts:
                dims = (*spec.dims[:i], ("_",), *spec.dims[i + 1 :])
                found.append(Fault(path, "a name removed", dim[0], place, replace(spec, dims=dims)))
        for name in spec.sums:
            if name in cuts:
                sums = tuple(n for n in spec.sums if n != name)
                found.append(Fault(path, "left out of the sum", name, place, replace(spec, sums=sums)))
        more = sorted(alone - {*spec.names, *spec.sums}) if spec.kind == "float" else []
        if more:
            name = more[turn % len(more)]
            found.append(Fault(path, "a sum too many", name, place, replace(spec, sums=(*spec.sums, name))))
    return found
