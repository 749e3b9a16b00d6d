"""Random bits as a function of a key and an index: no generator, no state, the same on every mesh.

SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) of the index, hashed
twice with a key for each: one round alone would make two streams windows of the same sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

# The increment and the two rounds (shift, multiplier) of SplitMix64's finaliser.
STEP, _ROUNDS, _LAST = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31

BITS = 52  # of a number: exact in float64


def keys(text: str) -> tuple[int, int]:
    """Two 64-bit keys of one stream. Streams of other texts are independent."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def signed(word: int) -> int:
    """The int64 with the low 64 bits of `word`."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def numbers(first: Tensor, second: int | Tensor, lines: Iterable[Tensor]) -> Tensor:
    """int64 in [0, 2**BITS), one dim per line. first, second: the keys, signed; the first is a scalar tensor.

    lines: per dim, what it adds to the element's linear index, times STEP (int64 wraps at 2^64).
    """
    z = first
    for line in lines:
        z = z.unsqueeze(-1) + line
    z = z.clone() if z is first else z
    scratch = torch.empty_like(z)
    scramble(z, scratch)
    z.bitwise_xor_(second)
    scramble(z, scratch)
    return z.bitwise_right_shift_(64 - BITS).bitwise_and_((1 << BITS) - 1)


def scramble(z: Tensor, scratch: Tensor) -> None:
    """SplitMix64's finaliser in place; the mask undoes the sign that int64 shifts in."""
    for shift, multiplier in (*_ROUNDS, (_LAST, 1)):
        torch.bitwise_right_shift(z, shift, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            z.mul_(signed(multiplier))
