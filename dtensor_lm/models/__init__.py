"""Models by name: single-device code and signatures."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import nn

from dtensor_lm.errors import ConfigError, nearest
from dtensor_lm.initial_values import abstract
from dtensor_lm.models.gpt import GPT, GPTConfig
from dtensor_lm.models.llama import Llama, LlamaConfig, RopeScaling

Config = LlamaConfig | GPTConfig
FAMILIES: dict[type, type[nn.Module]] = {LlamaConfig: Llama, GPTConfig: GPT}

_3_1 = RopeScaling()
_3_2 = RopeScaling(factor=32.0)

SHAPES: dict[str, Config] = {
    "tiny": LlamaConfig(
        vocab=256, embed=128, layers=4, heads=8, kv_heads=4, ffn=384, seq=256, rope_base=10_000.0, init_std=0.06
    ),
    "llama2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 11_008, seq=4096, rope_base=10_000.0),
    "llama3-1b": LlamaConfig(128_256, 2048, 16, 32, 8, 8192, rope_scaling=_3_2, tied=True),
    "llama3-3b": LlamaConfig(128_256, 3072, 28, 24, 8, 8192, rope_scaling=_3_2, tied=True),
    "llama3-8b": LlamaConfig(128_256, 4096, 32, 32, 8, 14_336, rope_scaling=_3_1),
    "llama3-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 28_672, rope_scaling=_3_1),
    "llama3-405b": LlamaConfig(128_256, 16_384, 126, 128, 8, 53_248, rope_scaling=_3_1),
    "tiny-gpt": GPTConfig(vocab=256, embed=128, layers=4, heads=8, seq=256, init_std=0.06),
    # Tables of 50,257 rows are padded to a multiple of 128, and for GPT-3 of 128 times 8 ranks, as Megatron-LM does.
    "gpt2": GPTConfig(50_304, 768, 12, 12),
    "gpt2-xl": GPTConfig(50_304, 1600, 48, 25),
    "gpt3-13b": GPTConfig(51_200, 5120, 40, 40, seq=2048),
    "gpt3-175b": GPTConfig(51_200, 12_288, 96, 96, seq=2048),
}


def config(name: str, **changes: Any) -> Config:
    """The shape of a model by name, with some fields changed.

    Raises `ConfigError` for an unknown name, and for a field that the family does not have.
    """
    if name not in SHAPES:
        known = f"{', '.join(SHAPES)}; or one of your own: package.module:function"
        raise ConfigError(f"unknown model {name!r}{nearest(name, SHAPES)}; known: {known}")
    names = [f.name for f in fields(SHAPES[name])]
    if unknown := [field for field in changes if field not in names]:
        raise ConfigError(
            f"model {name!r} cannot be changed so:",
            [f"it has no {field}{nearest(field, names)}; it has {', '.join(names)}" for field in unknown],
        )
    return replace(SHAPES[name], **changes)


def build(name: str, **changes: Any) -> nn.Module:
    """The model on the meta device: its shape, code, names and initialisers, but no memory yet."""
    shape = config(name, **changes)
    return abstract(lambda: FAMILIES[type(shape)](shape))
