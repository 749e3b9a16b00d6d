"""Faults in the signature of every region of every family: the check names the region and the dim."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from planted_signatures import Fault, faults, places, regions
from torch import nn

from dtensor_lm import models
from dtensor_lm.errors import ModelError
from dtensor_lm.initial_values import abstract
from dtensor_lm.models.narrow import narrow
from dtensor_lm.testing import Report, check_regions
from dtensor_lm.testing.workers import pool

BATCH = {
    name: torch.randint(0, 48, (6, 12), generator=torch.Generator().manual_seed(0)) for name in ("tokens", "labels")
}


def family(kind: type) -> nn.Module:
    """A narrow model with one layer of the first shape of a family that has a name."""
    shape = narrow(next(shape for shape in models.SHAPES.values() if type(shape) is kind), layers=1)
    return abstract(lambda: models.FAMILIES[kind](shape))


def check(model: nn.Module, k: int = 2) -> Report:
    return check_regions(model, BATCH, ks=(k,))


def test_the_families_are_those_that_are_known() -> None:
    assert {kind.__name__ for kind in models.FAMILIES} == {"LlamaConfig", "GPTConfig"}


def test_every_fault_is_named() -> None:
    """Of each family in a process of its own, so that all cores have work."""
    pool(len(models.FAMILIES)).run(every_fault_is_named, timeout=110)


def every_fault_is_named() -> None:
    """One fault in each region at once: regions are checked one by one, so none hides another."""
    model = family([*models.FAMILIES][dist.get_rank()])
    right = check(model)
    assert right.ok
    every = {
        path: faults(model, path, {name for region, name in right.hints if region == right.same.get(path, path)})
        for path in regions(model)
    }
    counts = Counter(fault.kind for found in every.values() for fault in found)
    assert min(counts[kind] for kind in ("a cut too many", "a sum too many", "left out of the sum")) >= 8, counts
    assert counts["a name removed"] >= 60 and all(len(found) >= 6 for found in every.values())
    for together in itertools.zip_longest(*every.values()):
        planted = [fault for fault in together if fault is not None]
        try:
            report = check(with_faults(model, planted))
        except ModelError:  # a name that an index needs is gone: this ends the check, so each stands alone
            for fault in planted:
                found_alone(model, fault)
        else:
            for fault in planted:
                found_among(report, fault)
            assert {v.region for v in report.violations} == {fault.region for fault in planted}


def with_faults(model: nn.Module, planted: list[Fault]) -> nn.Module:
    model = copy.deepcopy(model)
    for fault in planted:
        fault.plant(model)
    return model


def found_among(report: Report, fault: Fault) -> None:
    """Every violation of the region is about the name, and the repair of a sum is named too."""
    said = [v for v in report.violations if v.region == fault.region]
    assert said, f"{fault}: not found"
    assert all(fault.name in v.cut.split("+") for v in said), f"{fault}: {said}"
    if fault.kind in ("left out of the sum", "a sum too many"):
        assert any(f"+{fault.name} " in v.hint for v in said), f"{fault}: {said}"
    if fault.kind == "left out of the sum" and fault.place.side != "outer":
        assert any(v.hint == f"add +{fault.name} to {fault.place.tensor}" for v in said), f"{fault}: {said}"


def found_alone(model: nn.Module, fault: Fault) -> None:
    try:
        report = check(with_faults(model, [fault]))
    except ModelError as error:
        assert str(error).startswith(f"{fault.region or 'the model'} ") and repr(fault.name) in str(error), fault
    else:
        found_among(report, fault)


@pytest.mark.parametrize("kind", models.FAMILIES)
def test_a_dim_too_few_or_too_many_is_named(kind: type) -> None:
    """Of every tensor one of both, by turns. Nothing is cut: 5 divides no size."""
    model = family(kind)
    every = [(path, *each) for path in regions(model) for each in places(model, path)]
    for turn, (path, place, spec) in enumerate(every):
        dims = spec.dims[1:] if spec.dims and turn % 2 else (*spec.dims, ("more",))
        fault = Fault(path, "a name removed", "", place, replace(spec, dims=dims))
        with pytest.raises(ModelError) as error:
            check(with_faults(model, [fault]), k=5)
        title, *lines = str(error.value).splitlines()
        assert title == f"{path or 'the model'} contradicts its signature:", fault
        assert any(line.startswith(f"  - {place.tensor}: signature '{fault.spec}' has ") for line in lines), fault
