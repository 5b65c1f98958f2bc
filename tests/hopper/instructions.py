"""Arithmetic, comparisons, moves and control, on the registers of one warp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.hopper.decoder import Decoder, Maker
from tests.hopper.formats import (
    KINDS,
    WORDS,
    Function,
    arithmetic,
    bits,
    convert,
    fused,
    pair,
    shifted,
)
from tests.hopper.machine import BARRIER, EXIT, LANES, WORD, Code, Fault, Lanes, Warp
from tests.hopper.parse import Instruction, immediate

FUNCTIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "min": np.fmin, "max": np.fmax, "abs": np.abs,
    "neg": np.negative, "fma": fused, "mul": np.multiply, "div": np.divide, "rem": np.remainder,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "sqrt": np.sqrt, "ex2": np.exp2, "lg2": np.log2,
    "rcp": lambda x: (1 / x.astype(np.float64)).astype(x.dtype),
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
}  # fmt: skip


def make_function(d: Decoder, i: Instruction) -> Code:
    base, *_, name = i.name.split(".")
    function = FUNCTIONS[base]
    if base in ("add", "sub") and name[0] == "s":
        name = f"u{name[1:]}"  # the same bits
    if base in ("div", "rem") and name[0] in "us":
        function = partial(_whole_division, remainder=base == "rem")
    return d.function(i, arithmetic(function, name), [WORDS[name]] * (len(i.operands) - 1))


def _whole_division(a: Lanes, b: Lanes, remainder: bool) -> Lanes:
    """Toward zero."""
    by = np.where(b == 0, 1, b)
    found = (np.sign(a) * np.sign(by) * (np.abs(a) // np.abs(by))).astype(a.dtype)
    return (a - found * by).astype(a.dtype) if remainder else found


def make_multiply(d: Decoder, i: Instruction) -> Code:
    """mul and mad of integers: lo, hi or wide; mul of floats."""
    base, *mods, name = i.name.split(".")
    if name[0] not in "us":
        return make_function(d, i)
    kind, narrow = KINDS[name], WORDS[name]
    if "wide" in mods:
        wide = KINDS[name[0] + str(2 * int(name[1:]))]
        result = WORDS[name[0] + str(2 * int(name[1:]))]
    elif "hi" in mods:
        assert base == "mul" and np.dtype(kind).itemsize == 4, i
        wide, result = KINDS[name[0] + "64"], narrow
    else:
        assert "lo" in mods, i
        wide, result = kind, narrow

    def product(a: Lanes, b: Lanes, *c: Lanes) -> Lanes:
        found = a.view(kind).astype(wide) * b.view(kind).astype(wide)
        if "hi" in mods:
            return bits((found >> wide(32)).astype(kind))
        return bits(found + c[0].view(wide) if c else found)

    return d.function(i, product, [narrow, narrow, result][: len(i.operands) - 1])


def make_shift(d: Decoder, i: Instruction) -> Code:
    base, name = i.name.split(".")
    function = shifted(np.left_shift if base == "shl" else np.right_shift, name)
    return d.function(i, function, [WORDS[name], np.uint32])


def make_field(d: Decoder, i: Instruction) -> Code:
    """bfe: some bits of a register."""
    _, name = i.name.split(".")
    kind, width = KINDS[name], 8 * np.dtype(KINDS[name]).itemsize

    def field(x: Lanes, first: Lanes, length: Lanes) -> Lanes:
        first, length = first.astype(np.int64), length.astype(np.int64)
        assert (first + length <= width).all() and (length > 0).all()
        top = (x << (width - first - length).astype(x.dtype)).view(kind)
        return bits(top >> (width - length).astype(kind))

    return d.function(i, field, [WORDS[name], np.uint32, np.uint32])


COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def make_compare(d: Decoder, i: Instruction) -> Code:
    """setp, with a second predicate joined by and, or, xor where there is one."""
    _, test, *join, name = i.name.split(".")
    join = [j for j in join if j in ("and", "or", "xor")]
    kind = KINDS[name]
    # of floats: ne holds with NaN, the others do not; a trailing u turns that round
    unordered = test not in COMPARE
    compare = COMPARE.get(test[:2], np.equal)  # nan and num look at no order

    def run(a: Lanes, b: Lanes, *other: Lanes) -> Lanes:
        a, b = a.view(kind), b.view(kind)
        found: Lanes = compare(a, b)
        if np.dtype(kind).kind == "f":
            nan = np.isnan(a) | np.isnan(b)
            if test in ("nan", "num"):
                found = nan if test == "nan" else ~nan
            else:
                found = found | nan if unordered else found & ~nan
        return FUNCTIONS[join[0]](found, other[0]) if join else found

    word = WORDS[name]
    kinds = [word, word, np.bool_][: len(i.operands) - 1]
    target, *sources = map(str, i.operands)
    if "|" not in target:
        return d.function(i, run, kinds)
    if join:
        raise Fault(f"the emulator does not know {i}")
    at = [d.place(x, kind) for x, kind in zip(sources, kinds, strict=True)]

    def both(w: Warp) -> tuple[Lanes, Lanes]:
        found = run(*(w.registers[x] for x in at))
        return found, ~found

    return d.writes(i, [d.place(x, np.bool_) for x in target.split("|")], both)


def make_select(d: Decoder, i: Instruction) -> Code:
    word = WORDS[i.name.split(".")[-1]]
    return d.function(i, lambda a, b, p: np.where(p, a, b), [word, word, np.bool_])


def make_convert(d: Decoder, i: Instruction) -> Code:
    """cvt, with two sources for a pair of halves, the upper first."""
    _, *mods, to, source = i.name.split(".")
    word = WORDS[source]
    if to.endswith("x2"):
        assert "rn" in mods and source == "f32", i
        return d.function(i, partial(pair, name=to[:-2]), [word, word])
    return d.function(i, partial(convert, to=to, source=source, mods=tuple(mods)), [word])


def make_move(d: Decoder, i: Instruction) -> Code:
    """mov: registers, constants, special registers; pairs of halves in braces."""
    target, source = i.operands
    word = WORDS[i.name.split(".")[-1]]
    if isinstance(target, tuple):
        half = WORD[np.dtype(word).itemsize // 2]
        to, at = [d.place(t, half) for t in target], d.place(str(source), word)
        return d.writes(i, to, lambda w: list(np.ascontiguousarray(
            w.registers[at].view(half).reshape(LANES, 2).T)))  # fmt: skip
    to = [d.place(target, word)]
    if isinstance(source, tuple):
        half = WORD[np.dtype(word).itemsize // 2]
        parts = [d.place(s, half) for s in source]
        return d.writes(i, to, lambda w: np.stack(
            [w.registers[p] for p in parts], axis=1).view(word)[:, 0])  # fmt: skip
    if source in SPECIAL:
        special = SPECIAL[source]
        return d.writes(i, to, lambda w: np.broadcast_to(special(w), LANES).astype(word))
    at = d.place(source, word)
    return d.writes(i, to, lambda w: w.registers[at])


LANE = np.arange(LANES)
SPECIAL: dict[str, Callable[[Warp], Any]] = {
    "%tid.x": lambda w: LANES * w.number + LANE,
    "%laneid": lambda w: LANE,
    "%ntid.x": lambda w: LANES * len(w.block.warps),
    **{f"%ctaid.{a}": lambda w, n=n: w.block.place[n] for n, a in enumerate("xyz")},
    **{f"%nctaid.{a}": lambda w, n=n: w.block.grid[n] for n, a in enumerate("xyz")},
}


def make_permute(d: Decoder, i: Instruction) -> Code:
    """prmt.b32: four bytes of two registers by the selector's digits."""

    def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        both = np.concatenate([x.view(np.uint8).reshape(LANES, 4) for x in (a, b)], axis=1)
        digits = np.stack([(selector >> np.uint32(4 * n)) & np.uint32(15) for n in range(4)], 1)
        chosen = np.take_along_axis(both, (digits & 7).astype(np.int64), axis=1)
        sign = np.where(chosen >> 7, 0xFF, 0).astype(np.uint8)
        return np.where(digits & 8, sign, chosen).astype(np.uint8).view(np.uint32)[:, 0]

    return d.function(i, permute, [np.uint32] * 3)


def make_logic(d: Decoder, i: Instruction) -> Code:
    """lop3.b32: any function of three bits, by its table."""

    def logic(a: Lanes, b: Lanes, c: Lanes, table: Lanes) -> Lanes:
        found = np.zeros(LANES, np.uint32)
        for n in range(8):
            if int(table[0]) >> n & 1:
                terms = [x if n >> s & 1 else ~x for x, s in ((a, 2), (b, 1), (c, 0))]
                found |= terms[0] & terms[1] & terms[2]
        return found

    return d.function(i, logic, [np.uint32] * 4)


def make_branch(d: Decoder, i: Instruction) -> Code:
    goal, guard = d.program.labels[str(i.operands[0])], d.guard(i)

    def branch(w: Warp) -> int | None:
        mask = guard(w)
        if mask.all():
            return goal
        if mask.any():
            raise Fault("lanes of a warp part ways")
        return None

    return branch


def make_barrier(d: Decoder, i: Instruction) -> Code:
    if "warp" in i.name:
        return lambda w: None
    if i.operands != ("0",):
        raise Fault(f"the emulator knows barriers of the whole block, not {i}")
    return lambda w: BARRIER


def make_exit(d: Decoder, i: Instruction) -> Code:
    return lambda w: EXIT


def make_fence(d: Decoder, i: Instruction) -> Code:
    """Memory here is in order as it is, but for what products read."""
    if "proxy.async" in i.name:
        return lambda w: w.block.shared.fence(w.number)
    return lambda w: None


def make_shuffle(d: Decoder, i: Instruction) -> Code:
    """shfl.sync: a register of another lane; beyond the segment, of the lane itself."""
    target, source, by, clamp, members = map(str, i.operands)
    mode = i.name.split(".")[2]
    assert immediate(clamp) in (31, 0) and immediate(members) == -1, i
    segment = immediate(clamp)
    at, lane = d.place(source, np.uint32), d.place(by, np.uint32)

    def shuffle(w: Warp) -> Lanes:
        n = w.registers[lane].astype(np.int64)
        if mode == "bfly":
            other = LANE ^ n
        elif mode == "idx":
            other = n % LANES
        else:
            other = LANE + n if mode == "down" else LANE - n
            other = np.where((other >= 0) & (other < LANES), other, LANE)
        found: Lanes = w.registers[at][other]
        return found

    assert segment == 31 or mode == "up", i
    return d.writes(i, [d.place(target, np.uint32)], shuffle)


INSTRUCTIONS: dict[str, Maker] = {
    **dict.fromkeys(FUNCTIONS, make_function),
    **dict(mul=make_multiply, mad=make_multiply, shl=make_shift, shr=make_shift, bfe=make_field),
    **dict(setp=make_compare, selp=make_select, cvt=make_convert, mov=make_move),
    **dict(prmt=make_permute, lop3=make_logic, shfl=make_shuffle),
    **dict(bra=make_branch, bar=make_barrier, ret=make_exit, exit=make_exit),
    **dict(fence=make_fence, membar=make_fence),
}
