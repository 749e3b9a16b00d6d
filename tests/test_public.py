"""What users import."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_process import run_forked

import dtensor_lm


@pytest.mark.parametrize("name", dtensor_lm.__all__)
def test_every_public_name(name: str) -> None:
    assert getattr(dtensor_lm, name) is not None and name in dir(dtensor_lm)


@pytest.mark.parametrize("first", ["", "import dtensor_lm.partition", "import dtensor_lm; dtensor_lm.train_step"])
def test_partition_is_the_function_whatever_was_imported_before(first: str, tmp_path: Path) -> None:
    code = f"{first}\nfrom dtensor_lm import Mesh, Plan, plans, resolve, partition\nprint(partition.__class__.__name__)"
    (tmp_path / "example.py").write_text(code)
    ended, out, err = run_forked(["example.py"], tmp_path, 60)
    assert (ended, out) == (0, "function\n"), err


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Mush'"):
        _ = dtensor_lm.Mush
