"""Tiles of 8 x 8, mma of a warp, and the products of a warpgroup out of shared memory.

Lane l of a warp holds, of a 16 x 8 tile of fp32, rows l // 4 and l // 4 + 8, columns 2 (l % 4) and the next.
"""

import re
from functools import cache, partial
from typing import Any

import numpy as np

from tests.hopper.decoder import Decoder, Maker
from tests.hopper.formats import from_half, high, joined, low
from tests.hopper.machine import GROUP, HOLD, LANES, Code, Lanes, Memory, Shared, Warp
from tests.hopper.parse import Instruction

LANE = np.arange(LANES)
ROW, PAIR = LANE // 4, LANE % 4
SWIZZLE = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the mode of a descriptor


def make_load_tiles(d: Decoder, i: Instruction) -> Code:
    """ldmatrix: lane l gives the address of row l % 8 of tile l // 8."""
    targets, source = i.operands
    assert isinstance(targets, tuple)
    at, offset = d.address(str(source), np.uint32)
    turned = ".trans" in i.name

    def load(w: Warp) -> list[Lanes]:
        tiles = _rows(w.block.shared, w.registers[at].astype(np.int64) + offset, len(targets))
        tiles = tiles.swapaxes(1, 2) if turned else tiles
        return [joined(tile[ROW, 2 * PAIR], tile[ROW, 2 * PAIR + 1]) for tile in tiles]

    to = [d.place(t, np.uint32) for t in targets]
    if len(to) == 1:
        return d.writes(i, to, lambda w: load(w)[0])
    return d.writes(i, to, load)


def make_store_tiles(d: Decoder, i: Instruction) -> Code:
    """stmatrix, the other way."""
    target, sources = i.operands
    assert isinstance(sources, tuple) and not i.guard
    at, offset = d.address(str(target), np.uint32)
    given = [d.place(s, np.uint32) for s in sources]
    turned = ".trans" in i.name

    def store(w: Warp) -> None:
        address = w.registers[at].astype(np.int64) + offset
        for n, place in enumerate(given):
            tile = np.empty((8, 8), np.uint16)
            tile[ROW, 2 * PAIR] = low(w.registers[place])
            tile[ROW, 2 * PAIR + 1] = high(w.registers[place])
            tile = np.ascontiguousarray(tile.T if turned else tile).view(np.uint32)  # [8, 4]
            words = [np.resize(tile[:, j], LANES) for j in range(4)]
            mask = n == LANE // 8
            w.block.shared.store(address, mask, 4, [np.roll(x, 8 * n) for x in words])
            w.block.shared.mark(address, mask, 16, w.number)

    return store


def _rows(memory: Memory, address: Lanes, count: int) -> Lanes:
    """[count, 8, 8] halves"""
    words = memory.load(address, 8 * count > LANE, 4, 4)
    rows = np.stack(words, axis=1)[: 8 * count]  # [lanes, 4] words
    found: Lanes = np.ascontiguousarray(rows).view(np.uint16).reshape(count, 8, 8)
    return found


def wide(x: Lanes, name: str) -> Lanes:
    """Operands as fp32: halves, or words of which a tensor core reads the upper 19 bits."""
    if name == "tf32":
        found: Lanes = (x & np.uint32(0xFFFFE000)).view(np.float32)
        return found
    return from_half(x, name)


def left_tile(registers: list[Lanes], name: str) -> Lanes:
    """[16, 16] of halves or [16, 8] of words, from four registers of a warp."""
    words = name == "tf32"
    tile = np.zeros((16, 8 if words else 16), np.float32)
    for n, x in enumerate(registers):
        row, column = ROW + 8 * (n % 2), n // 2
        if words:
            tile[row, PAIR + 4 * column] = wide(x, name)
        else:
            tile[row, 2 * PAIR + 8 * column] = wide(low(x), name)
            tile[row, 2 * PAIR + 8 * column + 1] = wide(high(x), name)
    return tile


def right_tile(registers: list[Lanes], name: str) -> Lanes:
    """[16, 8] of halves or [8, 8] of words, from two registers of a warp."""
    words = name == "tf32"
    tile = np.zeros((8 if words else 16, 8), np.float32)
    for n, x in enumerate(registers):
        if words:
            tile[PAIR + 4 * n, ROW] = wide(x, name)
        else:
            tile[2 * PAIR + 8 * n, ROW] = wide(low(x), name)
            tile[2 * PAIR + 8 * n + 1, ROW] = wide(high(x), name)
    return tile


@cache
def sums_places(count: int) -> tuple[Lanes, Lanes]:
    """Row and column of what each lane holds in each of `count` registers, [count, lanes]."""
    n = np.arange(count)[:, None]
    return ROW + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * PAIR + n % 2


def sums_tile(registers: list[Lanes]) -> Lanes:
    """[16, n] fp32 from n / 2 registers."""
    tile = np.empty((16, 2 * len(registers)), np.float32)
    tile[sums_places(len(registers))] = np.stack(registers).view(np.float32)
    return tile


def sums_registers(tile: Lanes) -> list[Lanes]:
    return list(tile[sums_places(tile.shape[1] // 2)].view(np.uint32))


def make_mma(d: Decoder, i: Instruction) -> Code:
    """mma.sync m16n8: D = A B + C of one warp."""
    assert ".m16n8" in i.name and ".row.col." in i.name and not i.guard, i
    name = i.name.split(".")[-2]
    assert name in ("bf16", "f16", "tf32") and i.name.endswith(".f32"), i
    places = [[d.place(x, np.uint32) for x in group] for group in i.operands]
    to, left, right, start = places
    assert len(left) == 4 and len(right) == 2, i

    def run(w: Warp) -> None:
        def given(group: list[int]) -> list[Lanes]:
            return [w.registers[p] for p in group]

        tile = left_tile(given(left), name) @ right_tile(given(right), name)
        for place, value in zip(to, sums_registers(tile + sums_tile(given(start))), strict=True):
            w.registers[place] = value

    return run


@cache
def spread(
    rows: int, depth: int, size: int, swizzle: int, turned: bool
) -> tuple[Lanes, Lanes, Lanes]:
    """Of a tile [rows, depth] in shared memory, in bytes from its start, and how many leading and stride
    steps of the descriptor come on top. turned: rows lie next to one another, not depth."""
    row, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    width = SWIZZLE[swizzle]
    if turned:
        assert swizzle, "rows side by side come swizzled"
        return k % 8 * width + row * size % width, row * size // width, k // 8
    if swizzle:
        return row % 8 * width + k * size, np.zeros_like(row), row // 8
    return row % 8 * 16 + k * size % 16, k * size // 16, row // 8


def described(
    memory: Shared, descriptor: int, rows: int, depth: int, name: str, turned: bool
) -> Lanes:
    """[rows, depth] fp32 of a matrix descriptor."""
    start, leading, stride = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    swizzle, size = descriptor >> 62, 4 if name == "tf32" else 2
    assert descriptor >> 49 & 7 == 0, "a tile begins inside a swizzled pattern"
    inner, far, near = spread(rows, depth, size, swizzle, turned)
    address = start + inner + far * leading + near * stride
    if swizzle:
        address = address ^ ((address >> 7 & SWIZZLE[swizzle] // 16 - 1) << 4)
    return wide(memory.operand(address, size), name)


def make_warpgroup(d: Decoder, i: Instruction) -> Code:
    """wgmma: products of four warps that run beside them, and how they are waited for."""
    if ".fence" in i.name:
        return lambda w: None
    if ".commit_group" in i.name:
        return lambda w: w.committed.append(w.products)
    if ".wait_group" in i.name:
        return partial(_wait, pending=int(str(i.operands[0])))
    return _make_product(d, i)


def _wait(w: Warp, pending: int) -> int | None:
    wanted = w.committed[: max(0, len(w.committed) - pending)]
    count = wanted[-1] if wanted else 0
    if not w.block.groups[w.number // GROUP].finish(count):
        return HOLD
    for places, sums in w.flights[w.landed : count]:
        if w.registers[places[0]] is sums:
            for place, value in zip(places, sums_registers(sums.tile), strict=True):
                w.registers[place] = value
    w.landed = max(w.landed, count)
    return None


class Sums:
    """In registers whose product is under way, [16, n] fp32: nothing but another product may read it."""

    tile: Any = None


def _make_product(d: Decoder, i: Instruction) -> Code:
    shape = re.search(r"\.m64n(\d+)k(\d+)\.", i.name)
    name = i.name.split(".")[-1]
    assert shape and ".f32." in i.name and not i.guard, i
    columns, depth = int(shape[1]), int(shape[2])
    targets, left, right, keep, *flags = i.operands
    assert isinstance(targets, tuple) and all(f in ("0", "1") for f in flags), i
    assert flags[:2] == ["1", "1"], i
    turns = [f == "1" for f in flags[2:]]  # of A, if it is in memory, and of B
    turn_right = bool(turns) and turns[-1]
    turn_left = len(turns) > 1 and turns[0]
    to = [d.place(t, np.uint32) for t in targets]
    kept, right_at = d.place(str(keep), np.bool_), d.place(str(right), np.uint64)
    in_registers = isinstance(left, tuple)
    word = np.uint32 if in_registers else np.uint64
    left_at = [d.place(x, word) for x in (left if in_registers else (left,))]

    def issue(w: Warp) -> None:
        given = [w.registers[p] for p in left_at]
        descriptor = int(w.registers[right_at][0])
        start = [w.registers[p] for p in to] if w.registers[kept][0] else None
        sums: Any = Sums()
        w.flights.append((to, sums))
        for place in to:
            w.registers[place] = sums

        def product() -> None:
            """The warp's 16 rows."""
            memory = w.block.shared
            if in_registers:
                a = left_tile(given, name)
            else:
                rows = described(memory, int(given[0][0]), 16 * GROUP, depth, name, turn_left)
                a = rows[16 * (w.number % GROUP) :][:16]
            b = described(memory, descriptor, columns, depth, name, turn_right)
            sums.tile = a @ b.T
            if start is not None:
                before: Any = start[0]
                sums.tile += before.tile if isinstance(before, Sums) else sums_tile(start)

        w.block.groups[w.number // GROUP].issue(w, product, w.block.order.late)

    return issue


TENSOR_CORES: dict[str, Maker] = dict(
    ldmatrix=make_load_tiles, stmatrix=make_store_tiles, mma=make_mma, wgmma=make_warpgroup
)
