"""Formats of numbers, and functions on the bits that registers hold."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.hopper.machine import WORD, Lanes

KINDS: dict[str, Any] = {
    **{f"u{8 * n}": WORD[n] for n in WORD},
    **{f"b{8 * n}": WORD[n] for n in WORD},
    **dict(s8=np.int8, s16=np.int16, s32=np.int32, s64=np.int64),
    **dict(f32=np.float32, f64=np.float64, f16=np.float16, tf32=np.uint32, pred=np.bool_),
    **dict(bf16=np.uint16, bf16x2=np.uint32, f16x2=np.uint32, s16x2=np.uint32, u16x2=np.uint32),
}
WORDS: dict[str, Any] = {  # what registers hold of each
    name: np.bool_ if kind is np.bool_ else WORD[np.dtype(kind).itemsize]
    for name, kind in KINDS.items()
}
Function = Callable[..., Any]


def bits(x: Any) -> Lanes:
    """As unsigned words of the same size."""
    x = np.asarray(x)
    found: Lanes = x if x.dtype == np.bool_ else x.view(WORD[x.dtype.itemsize])
    return found


def from_bf16(x: Lanes) -> Lanes:
    found: Lanes = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return found


def rounded(u: Lanes) -> Lanes:
    """Bits of fp32 whose upper halves are the nearest in bf16, ties to even."""
    found: Lanes = u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))
    nan = np.isnan(u.view(np.float32))
    return np.where(nan, np.uint32(0x7FFF0000), found) if nan.any() else found


def to_bf16(x: Lanes) -> Lanes:
    return high(rounded(np.ascontiguousarray(x, np.float32).view(np.uint32)))


def pair(upper: Lanes, lower: Lanes, name: str) -> Lanes:
    """Of two numbers, given as bits of fp32, those of their halves."""
    if name == "bf16":
        first, last = rounded(np.concatenate([lower, upper])).reshape(2, -1)
        found: Lanes = last & np.uint32(0xFFFF0000) | first >> np.uint32(16)
        return found
    return joined(*(to_half(x.view(np.float32), name) for x in (lower, upper)))


def from_half(x: Lanes, name: str) -> Lanes:
    return from_bf16(x) if name == "bf16" else x.view(np.float16).astype(np.float32)


def to_half(x: Lanes, name: str) -> Lanes:
    return to_bf16(x) if name == "bf16" else x.astype(np.float16).view(np.uint16)


def low(x: Lanes) -> Lanes:
    return (x & np.uint32(0xFFFF)).astype(np.uint16)


def high(x: Lanes) -> Lanes:
    return (x >> np.uint32(16)).astype(np.uint16)


def joined(lower: Lanes, upper: Lanes) -> Lanes:
    found: Lanes = lower.astype(np.uint32) | (upper.astype(np.uint32) << np.uint32(16))
    return found


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a b + c, rounded once (twice where 53 bits do not hold it)."""
    found: Lanes = (a.astype(np.float64) * b + c).astype(a.dtype)
    return found


def arithmetic(function: Function, name: str) -> Function:
    """The function on bits of a format."""
    if name.endswith("x2"):
        each = arithmetic(function, name[:-2])
        return lambda *x: joined(each(*map(low, x)), each(*map(high, x)))
    if name in ("bf16", "f16"):
        return lambda *x: to_half(function(*(from_half(a, name) for a in x)), name)
    kind, word = KINDS[name], WORDS[name]
    if kind is word:
        return function
    return lambda *x: function(*[a.view(kind) for a in x]).view(word)


def shifted(function: Function, name: str) -> Function:
    """Shifts by more than the width empty the register, or fill it with the sign."""
    kind, width = KINDS[name], 8 * np.dtype(KINDS[name]).itemsize

    def run(x: Lanes, by: Lanes) -> Lanes:
        x, by = x.view(kind), by.astype(np.int64)
        inside = function(x, np.minimum(by, width - 1).astype(kind))
        signed = np.dtype(kind).kind == "i"
        return bits(inside if signed else np.where(by < width, inside, 0).astype(kind))

    return run


def convert(x: Lanes, to: str, source: str, mods: tuple[str, ...]) -> Lanes:
    value = from_half(x, source) if source in ("bf16", "f16") else x.view(KINDS[source])
    if to == "tf32":
        u = value.view(np.uint32)
        return (u + np.uint32(0x1000)) & np.uint32(0xFFFFE000)  # rna: ties away from zero
    if to in ("bf16", "f16"):
        return to_half(value.astype(np.float32), to)
    if "rzi" in mods:
        value = np.trunc(value)
    elif "rni" in mods:
        value = np.rint(value)
    elif "rmi" in mods:
        value = np.floor(value)
    return bits(value.astype(KINDS[to]))
