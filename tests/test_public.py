"""What users import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dtensor_lm


@pytest.mark.parametrize("name", dtensor_lm.__all__)
def test_every_public_name(name: str) -> None:
    assert getattr(dtensor_lm, name) is not None and name in dir(dtensor_lm)


@pytest.mark.parametrize("first", ["", "import dtensor_lm.partition", "import dtensor_lm; dtensor_lm.train_step"])
def test_partition_is_the_function_whatever_was_imported_before(first: str) -> None:
    code = f"{first}\nfrom dtensor_lm import Mesh, Plan, plans, resolve, partition\nprint(partition.__class__.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "function\n", ran.stderr


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Mush'"):
        _ = dtensor_lm.Mush
