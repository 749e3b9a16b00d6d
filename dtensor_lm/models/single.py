"""The unpartitioned model with values: for references and for samples of text."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def single_device(model: nn.Module, values: Mapping[str, Tensor], device: torch.device | str = "cpu") -> nn.Module:
    """A copy of a model on the meta device with whole parameters by name. Tied parameters stay tied.

    (`Module.to_empty` would give every use of a tied parameter a tensor of its own.)
    """
    model = copy.deepcopy(model)
    names = {id(p): name for name, p in model.named_parameters()}
    made = {
        name: nn.Parameter(values[name].to(device=device, dtype=p.dtype, copy=True))
        for name, p in model.named_parameters()
    }
    for module in model.modules():
        for local, p in module._parameters.items():
            if p is not None:
                module._parameters[local] = made[names[id(p)]]
    return model
