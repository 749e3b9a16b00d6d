"""Plan files: read from YAML's nodes, every fault of the file at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtensor_lm.errors import PlanError
from dtensor_lm.sharding_plans.plan_file import read_plan

pytestmark = pytest.mark.quick


def test_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("compute: {batch: [dp, fsdp], kv_heads: []}\nstorage:\n  embed: fsdp\nregather: no\n")
    plan = read_plan(str(file))
    assert plan.axes("compute", "batch") == ("dp", "fsdp") and plan.axes("compute", "kv_heads") == ()
    assert plan.axes("optimizer", "embed") == ("fsdp",) and not plan.regather


@pytest.mark.case("UX-01")
@pytest.mark.parametrize(
    "text, message",
    [
        ("compute: {batch: dp, batch: fsdp}", "p.yaml:1: batch is given twice"),
        ("compute: {batch: dp}\ncompute: {}", "p.yaml:2: compute is given twice"),
        ("storag: {embed: fsdp}", "unknown table 'storag' (did you mean storage?)"),
        ("compute: [batch]", "compute"),
        ("[" * 5000, ""),
        ("compute: {[a]: dp}", "a key must be a name"),
        ("compute: {batch: dp", "expected ',' or '}'"),
        ("2020-13-45", "is not a mapping"),
        ("!!int abc", "is not a mapping"),
        ("regather: 3", "neither true nor false"),
    ],
)
def test_faults(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        read_plan(str(file))
    assert message in str(error.value)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not a file"):
        read_plan(str(tmp_path))
