"""What failing tests say, for faults that many tests describe alike."""

from __future__ import annotations

FALSE = r"assert \(?False|where False = |assert not True"  # two tensors should be equal, or should differ
OTHER_ARRAY = r"Arrays are not equal"
MIXED_UP = r"assert \((True|False), (True|False), (True|False)\) == \(True, True, True\)"  # forward, backward, DTensor
NO_ERROR = r"DID NOT RAISE"


def report(*fields: str) -> str:
    """One of these numbers of a comparison with one device is more than rounding, or one of these flags is False."""
    rounding = r"(?:0\.0\b|\d(?:\.\d+)?e-1\d|True)"
    return "|".join(rf"\b{field}'?(?:=|: )(?!{rounding})" for field in fields)


def gradients() -> str:
    """A gradient, by its name, or a loss or a norm is not that of one device."""
    return r"AssertionError: [a-z0-9_.]+: \d|assert \d[\d.e-]* <= \(1e-12 \* |" + report("max_grad_error")
