"""A block of warps, its memory, and the order in which warps take turns."""

import bisect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LANES = 32
GROUP = 4  # warps that share a warpgroup's products
ANY = 255  # instead of a warp's number and 1
BASE = 1024  # where shared memory begins
WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ALL = np.ones(LANES, np.bool_)
NEXT = np.arange(16)[:, None]  # words or bytes behind an address

Lanes = np.ndarray[Any, np.dtype[Any]]  # one number per lane, as bits
Code = Callable[["Warp"], int | None]  # -> None: on to the next, or where to go on
# instead of a place: ask again later; wait for all; done; on to the next, but other programs may go first
HOLD, BARRIER, EXIT, REST = -1, -2, -3, -4


class Fault(Exception):
    """What a GPU would do something undefined at."""


class Memory:
    """Stretches of bytes at known addresses; nothing else may be touched."""

    def __init__(self, regions: Sequence[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]) -> None:
        known = sorted(dict(regions).items())
        self.starts = [start for start, _ in known]
        self.views = [{n: _as_words(data, n) for n in WORD} for _, data in known]
        self.ends = [start + len(data) for start, data in known]
        self.signals = 0  # additions by which programs tell others how far they are

    def load(self, address: Lanes, mask: Lanes, size: int, count: int = 1) -> list[Lanes]:
        """`count` words of `size` bytes per lane, one behind the other; zero where masked out."""
        found = np.zeros((count, LANES), WORD[size])
        for lanes, region, at in self._places(address, mask, size, count):
            found[:, lanes] = self.views[region][size][at + NEXT[:count]]
        return list(found)

    def store(self, address: Lanes, mask: Lanes, size: int, values: Sequence[Lanes]) -> None:
        given, count = np.array(values), len(values)
        for lanes, region, at in self._places(address, mask, size, count):
            self.views[region][size][at + NEXT[:count]] = given[:, lanes]

    def _places(
        self, address: Lanes, mask: Lanes, size: int, count: int
    ) -> Iterator[tuple[Any, int, Lanes]]:
        """Lanes, the region that they reach, and where in it, in words."""
        whole = mask is ALL or np.logical_and.reduce(mask)
        lanes: Any = slice(None) if whole else mask.nonzero()[0]
        wanted, reach = address[lanes], size * count
        if not len(wanted):
            return
        if int(np.bitwise_or.reduce(wanted)) % reach:
            raise Fault(f"one of {[*map(hex, wanted)]} is no multiple of {reach}")
        region = self._region(int(np.minimum.reduce(wanted)))
        start, end = self.starts[region], self.ends[region]
        if int(np.maximum.reduce(wanted)) + reach <= end:  # as nearly always
            yield lanes, region, (wanted - start) // size
        else:
            yield from self._scattered(np.arange(LANES)[lanes], wanted, size, reach)

    def _scattered(
        self, lanes: Lanes, wanted: Lanes, size: int, reach: int
    ) -> Iterator[tuple[Lanes, int, Lanes]]:
        while len(lanes):
            region = self._region(int(wanted[0]))
            start, end = self.starts[region], self.ends[region]
            here = (wanted >= start) & (wanted + reach <= end)
            if not here[0]:
                raise Fault(f"address {hex(wanted[0])} reaches out of bounds")
            yield lanes[here], region, (wanted[here] - start) // size
            lanes, wanted = lanes[~here], wanted[~here]

    def _region(self, address: int) -> int:
        region = bisect.bisect_right(self.starts, address) - 1
        if region < 0 or address >= self.ends[region]:
            raise Fault(f"address {address:#x} is out of bounds")
        return region


def _as_words(data: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> Lanes:
    return data[: len(data) // size * size].view(WORD[size])


class Shared(Memory):
    """Of a block. What warps store there is seen by products only behind a fence on the way: of the warp that
    stored, or of another behind a barrier."""

    def __init__(self, size: int) -> None:
        super().__init__([(BASE, np.full(size, 0xFF, np.uint8))])  # unwritten: NaN in every format
        self.unfenced = np.zeros(size, np.uint8)  # number of the warp that stored, and 1

    def mark(self, address: Lanes, mask: Lanes, size: int, warp: int | None) -> None:
        """`size` bytes per lane were stored by a warp, or (None) by a copy beside it."""
        self.unfenced[address[mask] - BASE + NEXT[:size]] = 0 if warp is None else warp + 1

    def barrier(self) -> None:
        self.unfenced[self.unfenced > 0] = ANY

    def fence(self, warp: int) -> None:
        self.unfenced[(self.unfenced == warp + 1) | (self.unfenced == ANY)] = 0

    def operand(self, address: Lanes, size: int) -> Lanes:
        """One word for each address, of any shape, as a product reads it."""
        if address.min() < BASE or address.max() + size > self.ends[0]:
            raise Fault(f"a product reads {int(address.min()):#x} to {int(address.max()):#x}")
        if self.unfenced[address - BASE].any():
            raise Fault("a product reads what was stored without a fence")
        found: Lanes = self.views[0][size][(address - BASE) // size]
        return found


@dataclass(frozen=True)
class Order:
    """How far apart things happen that nothing orders.

    warps: which of those that can go on goes first, and on until it must wait: "up", "down", "random"
    late: copies and products that run beside a warp happen when it waits for them, not at once
    """

    warps: str = "up"
    late: bool = False
    seed: int = 0


@dataclass
class Warp:
    number: int
    block: "Block"
    registers: list[Lanes]
    pc: int = 0
    waits: bool = False  # at a barrier
    done: bool = False
    held: bool = False  # must be asked again
    rests: bool = False  # has looked for a sign of another program
    open: list[Callable[[], None]] = field(default_factory=list)  # copies not committed yet
    copies: list[list[Callable[[], None]]] = field(default_factory=list)
    products: int = 0  # issued so far
    committed: list[int] = field(default_factory=list)  # issued at each commit
    flights: list[Any] = field(default_factory=list)  # registers and sums of each product
    landed: int = 0  # products whose sums are in the registers

    def finish_copies(self, pending: int) -> None:
        while len(self.copies) > pending:
            for copy in self.copies.pop(0):
                copy()


Product = Callable[[dict[Any, Lanes]], None]  # the rows of one warp; tiles that the four have read


class Warpgroup:
    """Products of four warps: each is done for all of them at once, when all have issued it."""

    def __init__(self, warps: Sequence[Warp]) -> None:
        self.warps = warps
        self.issued: list[list[Product]] = []
        self.finished = 0

    def issue(self, warp: Warp, product: Product, late: bool) -> None:
        if warp.products == len(self.issued):
            self.issued.append([])
        self.issued[warp.products].append(product)
        warp.products += 1
        if not late:
            self.finish(min(w.products for w in self.warps))

    def finish(self, count: int) -> bool:
        """All products up to `count`; False where some warp has not issued them."""
        if any(w.products < count for w in self.warps):
            return False
        while self.finished < count:
            tiles: dict[Any, Lanes] = {}
            for product in self.issued[self.finished]:
                product(tiles)
            self.issued[self.finished] = []
            self.finished += 1
        return True


class Block:
    """One program of the grid."""

    def __init__(
        self,
        code: Sequence[Code],
        registers: Sequence[Lanes],
        memory: Memory,
        arguments: Sequence[int],
        warps: int,
        shared: int,
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
        order: Order,
    ) -> None:
        self.code, self.memory, self.arguments = code, memory, arguments
        self.place, self.grid, self.order = place, grid, order
        self.shared = Shared(shared)
        self.warps = [Warp(n, self, list(registers)) for n in range(warps)]
        self.groups = [Warpgroup(self.warps[n : n + GROUP]) for n in range(0, warps, GROUP)]
        self.random = random.Random(order.seed)

    def run(self) -> Iterator[None]:
        """Until all warps are done. Stops where all that can go on look for signs of other programs."""
        while True:
            ready = [w for w in self.warps if not (w.done or w.waits)]
            fresh = [w for w in ready if not (w.held or w.rests)]
            if not fresh and any(w.rests for w in ready):
                yield
                for warp in ready:
                    warp.rests = False
                continue
            if ready and not fresh:
                raise Fault("all warps wait for products that some warp never issues")
            if not ready:
                if all(w.done for w in self.warps):
                    return
                self.shared.barrier()
                for warp in self.warps:
                    warp.waits = False
                continue
            self._advance(self._next(fresh))

    def _next(self, ready: Sequence[Warp]) -> Warp:
        if self.order.warps == "random":
            return self.random.choice(ready)
        return ready[0 if self.order.warps == "up" else -1]

    def _advance(self, warp: Warp) -> None:
        code, pc = self.code, warp.pc
        try:
            while True:
                step = code[pc](warp)
                if step is None:
                    pc += 1
                elif step >= 0:
                    pc = step
                else:
                    break
        except Exception as trouble:
            where = f"warp {warp.number} of program {self.place}, instruction {pc}"
            raise Fault(f"{where}: {trouble}") from trouble
        moved = pc != warp.pc or step != HOLD
        warp.pc = pc + (step in (BARRIER, REST))
        warp.waits, warp.done = step == BARRIER, step == EXIT
        if moved:
            for other in self.warps:  # those that were held may go on
                other.held = False
        warp.held, warp.rests = step == HOLD, step == REST
