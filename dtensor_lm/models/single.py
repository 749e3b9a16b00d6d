"""The unpartitioned model with values: for references, for samples of text, for the law of regions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_lm.ops.dropout import Moment, Site
from dtensor_lm.region import bind, is_region, signature


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


@contextmanager
def drawing(model: nn.Module, moment: Moment) -> Iterator[None]:
    """Within it the regions of an unpartitioned model get their `random` inputs, whole: what a mesh draws in parts."""
    handles = []
    for path, module in model.named_modules():
        names = (
            [n for n, c in signature(module).inputs.items() if c.inner.kind == "random"] if is_region(module) else []
        )
        if names:
            sites = {name: Site(f"{path}.{name}", device=moment.keys.device) for name in names}
            handles.append(module.register_forward_pre_hook(_supply(sites, moment), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _supply(sites: Mapping[str, Site], moment: Moment) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = bind(module.forward)(*args, **kwargs)
        for name, site in sites.items():
            if bound.arguments[name] is None:
                bound.arguments[name] = site.at(moment)
        return bound.args, bound.kwargs

    return hook
