"""A narrow model of the same code: every switch as it was, sizes that are small and have many divisors.

    narrow(SHAPES["llama3-405b"])      # LlamaConfig(vocab=48, embed=384, layers=2, heads=96, kv_heads=6, ffn=24, ...)

What holds for it as a law of names holds for the wide one: the code is the same, and takes sizes from its tensors.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Shape = TypeVar("Shape", bound="DataclassInstance")

HEAD_DIM = 4  # rotary positions turn pairs of halves
# By the name of a config's field. Heads come last, as multiples: each has parts of 2, 3 and 6.
SIZES = {"vocab": 48, "ffn": 24, "layers": 2, "seq": 12, "kv_heads": 6, "heads": 6}


def narrow(shape: Shape, **given: int) -> Shape:
    """The dataclass `shape` with small sizes, by the names of its fields; fields of other names stay as they are.

    given: sizes to have instead.

    The number of query heads per kv head is a switch, not a size: it stays. So does how the width of a head is given:
    where `head_dim` is 0 or missing, embed // heads.
    """
    assert is_dataclass(shape)
    old = {f.name: getattr(shape, f.name) for f in fields(shape)}
    new: dict[str, Any] = {name: size for name, size in SIZES.items() if name in old}
    if old.get("kv_heads"):
        new["heads"] = new["kv_heads"] * (old["heads"] // old["kv_heads"])
    if old.get("head_dim"):
        new |= {"head_dim": HEAD_DIM, "embed": 24}
    elif "embed" in old:
        new["embed"] = new.get("heads", SIZES["heads"]) * HEAD_DIM
    return replace(shape, **{**new, **given})


def sizes(shape: DataclassInstance) -> dict[str, int]:
    """What `narrow` may change, by the names of fields; without zeros, which stand for a value that follows."""
    names = {*SIZES, "embed", "head_dim"}
    return {f.name: size for f in fields(shape) if f.name in names and (size := getattr(shape, f.name))}
