"""What can be said of a model's signatures without running it: which regions there are, and who names a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtensor_lm.errors import ModelError, nearest
from dtensor_lm.region import SUPPLIED, Region, TensorSpec, factors, is_region, signature

Shape = tuple[int, ...]


@dataclass
class Value:
    """A tensor that crossed a region's border in the whole model: global shape and dtype."""

    shape: Shape
    dtype: str
    grad: bool = True  # whether a gradient flows back through it


def value_of(tensor: Tensor) -> Value:
    return Value(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)


@dataclass(frozen=True)
class Use:
    """A parameter as one region uses it. `local` is its path below the region."""

    region: str
    local: str
    parameter: str
    spec: TensorSpec


class Signatures:
    """The regions of a model, the sizes of their names, and everything that contradicts them (`faults`).

    parents: region -> the enclosing region, None for the model itself. units: region -> the maximal region below the
    model that it stands in ('' for the model itself).
    """

    def __init__(self, model: nn.Module) -> None:
        self.faults: list[str] = []
        self.regions = {path: m for path, m in model.named_modules() if is_region(m)}
        self.second = _second_names(model)
        self.faults += [
            f"{path}: the module {first} under a second name: use one name, and call it as often as you like"
            for path, first in self.second.items()
        ]
        if "" not in self.regions:
            raise ModelError("the model itself must be a region: give its class a `region` with inputs and outputs")
        self.parents: dict[str, str | None] = {"": None}
        for path in self.regions:
            self.parents.setdefault(path, next((p for p in _above(path) if p in self.regions), ""))
        self.units = {path: self._unit(path) for path in self.regions}
        self.sizes: dict[str, dict[str, int]] = {path: {} for path in self.regions}
        self.parameters = {n: value_of(p) for n, p in model.named_parameters()}
        self.faults += [f"{n}: frozen parameters are not supported" for n, v in self.parameters.items() if not v.grad]
        self.uses: list[Use] = []
        self._claim(model, {id(p): name for name, p in model.named_parameters()})

    def _unit(self, path: str) -> str:
        while path and self.parents[path] != "":
            path = self.parents[path] or ""
        return path

    def _claim(self, model: nn.Module, names: dict[int, str]) -> None:
        claimed = set()
        for path, module in self.regions.items():
            prefix = f"{path}." if path else ""
            below = dict(module.named_parameters(remove_duplicate=False))
            for local, spec in signature(module).params.items():
                if local not in below:
                    self.faults.append(
                        f"{prefix}{local}: the region names a parameter that does not exist" + nearest(local, below)
                    )
                    continue
                claimed.add(prefix + local)
                parameter = below[local]
                self.learn(path, spec, tuple(parameter.shape), prefix + local)
                self.uses.append(Use(path, local, names[id(parameter)], spec))
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name not in claimed and not any(name.startswith(f"{path}.") for path in self.second):
                owner = next(p for p in _above(name) if p in self.regions)
                local = name[len(owner) + 1 :] if owner else name
                self.faults.append(
                    f"{name}: no region names its dims; add {local!r} to params of the region of "
                    f"{type(self.regions[owner]).__name__} ({owner or 'the model'})"
                )

    def check_arguments(self, sizes: Mapping[str, int]) -> None:
        """What can be said of signatures before any code runs."""
        for path, module in self.regions.items():
            region, where = signature(module), path or "the model"
            known = inspect.signature(module.forward).parameters
            for name in region.inputs:
                if name not in known:
                    self.faults.append(
                        f"{where}: forward has no parameter {name!r}{nearest(name, known)}; it has {', '.join(known)}"
                    )
            names = set(region.own_names())
            for child in (p for p, parent in self.parents.items() if parent == path):
                inner = signature(self.regions[child])
                for crossing in (*inner.inputs.values(), *inner.outputs):
                    names.update((*crossing.outer.names, *crossing.outer.sums))
            for name in sorted({name for cut in region.cuts for name in cut} - names):
                self.faults.append(f"{where}: cuts: no tensor of the region is called {name!r}{nearest(name, names)}")
        for name, crossing in signature(self.regions[""]).inputs.items():
            if crossing.inner.kind == "float":
                self.faults.append(f"the model: input {name} must be integers: write 'int {crossing.inner}'")
            elif missing := [n for n in crossing.inner.names if crossing.inner.kind == "int" and n not in sizes]:
                self.faults.append(
                    f"the model: input {name}: the size of {', '.join(missing)} is not known; inputs of "
                    f"the model are made of {', '.join(sizes)}"
                )

    def learn(self, path: str, spec: TensorSpec, shape: Shape, what: str) -> None:
        """Takes the sizes of names from a tensor, or notes how it contradicts its signature."""
        if len(spec.dims) != len(shape):
            self.faults.append(f"{what}: signature '{spec}' has {len(spec.dims)} dims, the tensor {list(shape)}")
            return
        for names, size in zip(spec.dims, shape, strict=True):
            try:
                found = factors(self.regions[path], names, size) if names != ("_",) else {}
            except ValueError as error:
                self.faults.append(f"{what}: {error}")
                continue
            for name, value in found.items():
                known = self.sizes[path].setdefault(name, value)
                if known != value:
                    self.faults.append(f"{what}: {name} has size {value} here and {known} elsewhere in the region")

    def own(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """The parameters that a region names: holder, attribute, parameter."""
        found = []
        for local in signature(module).params:
            path, _, attribute = local.rpartition(".")
            found.append((module.get_submodule(path), attribute, module.get_parameter(local)))
        return found


def _second_names(model: nn.Module) -> dict[str, str]:
    """Other names of modules that have one already, with parameters below them -> their first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        inside = any(path.startswith(f"{other}.") for other in found)
        if known != path and not inside and next(module.parameters(), None) is not None:
            found[path] = known
    return found


def names_of(
    regions: Mapping[str, nn.Module], parents: Mapping[str, str | None]
) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Per region: names that make axes live, and all names, with the outer sides of inner regions."""
    floats = {p: set(signature(m).float_names()) for p, m in regions.items()}
    every = {p: set(signature(m).own_names()) for p, m in regions.items()}
    for path, module in regions.items():
        parent = parents[path]
        if parent is None:
            continue
        region = signature(module)
        for crossing in (*region.inputs.values(), *region.outputs):
            if crossing.outer.kind in SUPPLIED:
                continue
            names = (*crossing.outer.names, *crossing.outer.sums)
            every[parent].update(names)
            if crossing.outer.kind == "float":
                floats[parent].update(names)
    return {p: (frozenset(floats[p]), frozenset(every[p])) for p in floats}


def argument_fault(region: Region, name: str, value: Any) -> str:
    """What is wrong with an argument that a region is given; '' if nothing is."""
    if isinstance(value, Tensor):
        return "" if name in region.inputs else f"input {name} is a tensor without a signature"
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return f"input {name} is a {type(value).__name__} that holds tensors: pass each as an argument with a signature"
    return ""


def output_fault(region: Region, out: Any) -> str:
    """What is wrong with what a region returns; '' if nothing is."""
    if region.single:
        return (
            "" if isinstance(out, Tensor) else f"returns a {type(out).__name__}, its signature has one output, a tensor"
        )
    if not isinstance(out, tuple | list):
        return f"returns a {type(out).__name__}, its signature has a tuple of {len(region.outputs)} outputs"
    if len(out) != len(region.outputs):
        return f"returns {len(out)} outputs, its signature has {len(region.outputs)}"
    bad = [i for i, x in enumerate(out) if not isinstance(x, Tensor) and x is not None]
    return f"output {bad[0]} is a {type(out[bad[0]]).__name__}: outputs are tensors, or None" if bad else ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)]
