"""Learning rates: the first and the last step of each schedule, and what lies between."""

from __future__ import annotations

import math

import pytest

from dtensor_lm.training.learning_rate import make

pytestmark = pytest.mark.quick


def factors(kind: str, total: int, warmup_steps: int = 0, decay_steps: int = 0, final: float = 0.0) -> list[float]:
    schedule = make(kind, total, warmup_steps, decay_steps, final)
    return [schedule(step) for step in range(total)]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up(kind: str) -> None:
    """The first step trains already, and the last step of the warm-up is the first at the full rate."""
    assert factors(kind, 100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors(kind, 100)[0] == 1.0


def test_cosine() -> None:
    found = factors("cosine", 11, final=0.2)
    assert found == pytest.approx([0.6 + 0.4 * math.cos(math.pi * step / 10) for step in range(11)], rel=1e-15)
    assert (found[0], found[5], found[10]) == pytest.approx((1.0, 0.6, 0.2), rel=1e-15)
    after = make("cosine", 11, 0, 0, 0.2)(25)
    assert after == pytest.approx(0.2, rel=1e-15)  # a run that goes on stays there
    assert factors("cosine", 14, warmup_steps=3, final=0.2)[3:] == pytest.approx(found, rel=1e-15)


def test_warmup_stable_decay() -> None:
    assert factors("wsd", 8, warmup_steps=2, decay_steps=4, final=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-15
    )
    assert factors("wsd", 4) == [1.0] * 4


def test_constant() -> None:
    assert factors("constant", 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="no schedule called linear"):
        make("linear", 4, 0, 0, 0.0)
