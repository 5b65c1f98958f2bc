"""Tiles of 8 x 8, mma of a warp, and the products of a warpgroup out of shared memory.

Lane l of a warp holds, of a 16 x 8 tile of fp32, rows l // 4 and l // 4 + 8, columns 2 (l % 4) and the next.
"""

import re
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from tests.hopper.decoder import Decoder, Maker
from tests.hopper.formats import from_half
from tests.hopper.machine import GROUP, HOLD, LANES, Code, Lanes, Shared, Warp
from tests.hopper.parse import Instruction

LANE = np.arange(LANES)
SWIZZLE = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the mode of a descriptor


def make_load_tiles(d: Decoder, i: Instruction) -> Code:
    """ldmatrix: lane l gives the address of row l % 8 of tile l // 8."""
    targets, source = i.operands
    assert isinstance(targets, tuple)
    at, offset = d.address(str(source), np.uint32)
    turned, count = ".trans" in i.name, len(targets)
    mask = 8 * count > LANE

    def load(w: Warp) -> list[Lanes]:
        address = w.registers[at].astype(np.int64) + offset
        words = w.block.shared.load(address, mask, 4, 4)
        tiles = np.ascontiguousarray(np.array(words).T)[: 8 * count].reshape(count, 8, 4)
        return list((_turned(tiles) if turned else tiles).reshape(count, LANES))

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
    turned, count = ".trans" in i.name, len(given)
    mask = 8 * count > LANE

    def store(w: Warp) -> None:
        address = w.registers[at].astype(np.int64) + offset
        tiles = np.array([w.registers[place] for place in given]).reshape(count, 8, 4)
        words = np.zeros((4, LANES), np.uint32)
        words[:, mask] = (_turned(tiles) if turned else tiles).reshape(-1, 4).T
        w.block.shared.store(address, mask, 4, list(words))
        w.block.shared.mark(address, mask, 16, w.number)

    return store


def _turned(tiles: Lanes) -> Lanes:
    """Tiles [n, 8, 4] of words, that is [n, 8, 8] of halves, transposed."""
    halves = tiles.view(np.uint16).swapaxes(1, 2)
    found: Lanes = np.ascontiguousarray(halves).view(np.uint32)
    return found


def wide(x: Lanes, name: str) -> Lanes:
    """Operands as fp32: halves, or words of which a tensor core reads the upper 19 bits."""
    if name == "tf32":
        found: Lanes = (x & np.uint32(0xFFFFE000)).view(np.float32)
        return found
    return from_half(x, name)


def left_tile(registers: list[Lanes], name: str) -> Lanes:
    """[16, 16] of halves or [16, 8] of words, from four registers of a warp."""
    lanes = np.concatenate(registers)
    if name == "tf32":
        return wide(_laid(lanes, (2, 2, 8, 4), (1, 2, 0, 3), 16), name)
    return wide(_laid(lanes.view(np.uint16), (2, 2, 8, 4, 2), (1, 2, 0, 3, 4), 16), name)


def right_tile(registers: list[Lanes], name: str) -> Lanes:
    """[16, 8] of halves or [8, 8] of words, from two registers of a warp."""
    lanes = np.concatenate(registers)
    if name == "tf32":
        return wide(_laid(lanes, (2, 8, 4), (0, 2, 1), 8), name)
    return wide(_laid(lanes.view(np.uint16), (2, 8, 4, 2), (0, 2, 3, 1), 16), name)


def _laid(lanes: Lanes, axes: tuple[int, ...], order: tuple[int, ...], rows: int) -> Lanes:
    """As a matrix. axes: registers, one axis or two; rows of a tile; pairs of columns; halves"""
    found: Lanes = lanes.reshape(axes).transpose(order).reshape(rows, -1)
    return found


def sums_tile(registers: list[Lanes]) -> Lanes:
    """[16, n] fp32 from n / 2 registers."""
    lanes = np.concatenate(registers).view(np.float32)
    return _laid(lanes, (-1, 2, 2, 8, 4), (1, 3, 0, 4, 2), 16)


def sums_registers(tile: Lanes) -> list[Lanes]:
    lanes = tile.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
    return list(lanes.view(np.uint32))


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


@lru_cache(maxsize=1024)
def described(descriptor: int, rows: int, depth: int, size: int, turned: bool) -> Lanes:
    """Addresses of the tile [rows, depth] of a matrix descriptor."""
    start, leading, stride = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    swizzle = descriptor >> 62
    assert descriptor >> 49 & 7 == 0, "a tile begins inside a swizzled pattern"
    inner, far, near = spread(rows, depth, size, swizzle, turned)
    address = start + inner + far * leading + near * stride
    if swizzle:
        address = address ^ ((address >> 7 & SWIZZLE[swizzle] // 16 - 1) << 4)
    return address


def read_tile(
    tiles: dict[Any, Lanes], memory: Shared, name: str, descriptor: int, *shape: Any
) -> Lanes:
    """[rows, depth] fp32, read once for the four warps. shape: rows, depth, turned"""
    rows, depth, turned = shape
    size = 4 if name == "tf32" else 2
    if (descriptor, *shape) not in tiles:
        address = described(descriptor, rows, depth, size, turned)
        tiles[descriptor, *shape] = wide(memory.operand(address, size), name)
    return tiles[descriptor, *shape]


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

        def product(tiles: dict[Any, Lanes]) -> None:
            """The warp's 16 rows."""
            read = partial(read_tile, tiles, w.block.shared, name)
            if in_registers:
                a = left_tile(given, name)
            else:
                rows = read(int(given[0][0]), 16 * GROUP, depth, turn_left)
                a = rows[16 * (w.number % GROUP) :][:16]
            b = read(descriptor, columns, depth, turn_right)
            sums.tile = a @ b.T
            if start is not None:
                before: Any = start[0]
                sums.tile += before.tile if isinstance(before, Sums) else sums_tile(start)

        w.block.groups[w.number // GROUP].issue(w, product, w.block.order.late)

    return issue


TENSOR_CORES: dict[str, Maker] = dict(
    ldmatrix=make_load_tiles, stmatrix=make_store_tiles, mma=make_mma, wgmma=make_warpgroup
)
