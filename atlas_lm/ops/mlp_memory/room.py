"""How many hidden units a program of the reads has room for, without Triton: `why_not_sizes` asks before any
kernel is compiled. The formula is what Triton takes for the widest kernel, back through the reads, seen in
compiled kernels of twelve shapes (docs/kernels.md, section 1.7): never less, and at most 10 KiB more."""

from dataclasses import dataclass

SHARED = 227 * 1024  # bytes that a program on Hopper can have
UNITS = (64, 32, 16)  # that a program holds at a time, the most there is room for


@dataclass(frozen=True)
class Room:
    """chunk: its tokens, edge: pairs before it   weights: 2, or 3 with a gate
    states: memory, momentum, start, as many as there are"""

    chunk: int
    edge: int
    features: int
    values: int
    weights: int
    states: int
    element: int  # bytes of a number

    def shared(self, units: int) -> int:
        """Bytes: rows of all weights, queries and pairs, two tiles of scores."""
        columns = (self.weights - 1) * filled(self.features) + padded(self.values)
        rows = filled(self.features) + padded(self.values)
        numbers = units * self.states * columns + rows * (2 * self.chunk + self.edge)
        return self.element * (numbers + 2 * self.chunk * (self.chunk + self.edge))

    def units(self, most: int) -> int | None:
        """How many at a time; None: not even the fewest."""
        return next((n for n in UNITS if n <= most and self.shared(n) <= SHARED), None)


def filled(width: int, block: int = 64) -> int:
    """Columns of blocks, the last of which is as wide as it must be, a power of two."""
    whole, rest = divmod(width, block)
    return whole * block + (padded(rest) if rest else 0)


def padded(size: int) -> int:
    """The next power of two, at least the 16 that products need."""
    return max(16, 1 << (size - 1).bit_length())


def edge_of(window: int) -> int:
    """Pairs before a chunk that its tensors hold: those of the window, in sixteens."""
    return -(-(window - 1) // 16) * 16
