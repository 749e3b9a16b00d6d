"""What crosses a region's border without a signature is refused, by the check of regions and by `resolve` alike: on a
mesh it would get no edge, and give an exact loss with wrong gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_models import MLP, Loss, Table
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.errors import ModelError
from dtensor_lm.testing import check_regions

pytestmark = pytest.mark.quick


class Odd(MLP):
    """A feed-forward layer that is called and that answers in some way."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__(8, 16)
        self.answer = answer

    def forward(self, x: Tensor, more: Any = (), **others: Any) -> Any:
        return self.answer(super().forward(x))


class Model(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq",
        cuts="batch seq res seq+res",
    )

    def __init__(self, call: Callable[[Any, Tensor], Any], answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.mlp, self.loss, self.call = Table(12, 8), Odd(answer), Loss(), call

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        out = self.call(self.mlp, self.table(tokens))
        return self.loss(out if isinstance(out, Tensor) else self.table(tokens), labels)


def plain(mlp: Any, x: Tensor) -> Any:
    return mlp(x)


FAULTS: list[tuple[str, Callable[[Any, Tensor], Any], Callable[[Tensor], Any], str]] = [
    ("list", lambda m, x: m(x, [x]), lambda y: y, "input more is a list that holds tensors: pass each as an argument"),
    ("dict", lambda m, x: m(x, {"a": [x]}), lambda y: y, "input more is a dict that holds tensors"),
    ("keyword", lambda m, x: m(x, a=x), lambda y: y, "input others is a dict that holds tensors"),
    ("unsigned", lambda m, x: m(x, x), lambda y: y, "input more is a tensor without a signature"),
    ("tuple", plain, lambda y: (y, None), "returns a tuple, its signature has one output, a tensor"),
    ("none", plain, lambda y: None, "returns a NoneType, its signature has one output, a tensor"),
]


@pytest.mark.parametrize("call, answer, said", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_tensors_without_a_signature(
    call: Callable[[Any, Tensor], Any], answer: Callable[[Tensor], Any], said: str
) -> None:
    model = dl.abstract(lambda: Model(call, answer))
    with pytest.raises(ModelError) as error:
        check_regions(model)
    assert f"mlp contradicts its signature:\n  - {said}" in str(error.value)
    with pytest.raises(ModelError) as error:
        dl.resolve(model, dl.Plan({"ffn": "tp"}), dl.Mesh(tp=2), batch=2, seq=4)
    assert f"mlp: {said}" in str(error.value)


class Pair(MLP):
    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs=("batch seq embed +ffn -> batch res embed",) * 2,
        params={"up.weight": "ffn embed", "up.bias": "ffn", "down.weight": "embed ffn", "down.bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, count: int) -> None:
        super().__init__(8, 16)
        self.count = count

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),) * self.count


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_outputs(count: int) -> None:
    model = dl.abstract(lambda: Model(lambda m, x: m(x)[0], lambda y: y))
    model.mlp = dl.abstract(lambda: Pair(count))
    with pytest.raises(ModelError, match=rf"mlp contradicts its signature:\n  - returns {count} outputs, its .* has 2"):
        check_regions(model)
    with pytest.raises(ModelError, match=rf"mlp: returns {count} outputs, its signature has 2"):
        dl.resolve(model, dl.Plan({"ffn": "tp"}), dl.Mesh(tp=2), batch=2, seq=4)


class Masked(nn.Module):
    """A mask of bools made by the model."""

    region = dl.Region(
        {"x": "batch res embed", "mask": "int batch res"}, "batch res embed", cuts="batch res", params={"w": "embed"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.w * mask.unsqueeze(-1)


def test_a_mask_of_bools() -> None:
    model = dl.abstract(lambda: Model(lambda m, x: m(x, x[..., 0] * 0 == 0), lambda y: y))
    model.mlp = dl.abstract(Masked)
    assert check_regions(model).ok


class Twice(Model):
    def __init__(self) -> None:
        super().__init__(plain, lambda y: y)
        self.again = self.mlp

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.again(self.mlp(self.table(tokens))), labels)


def test_a_module_under_two_names() -> None:
    with pytest.raises(ModelError) as error:
        dl.resolve(dl.abstract(Twice), dl.Plan({"ffn": "tp"}), dl.Mesh(tp=2), batch=2, seq=4)
    assert str(error.value).splitlines()[1:] == [
        "  - again: the module mlp under a second name: use one name, and call it as often as you like"
    ]
