"""Lay tokens out so that the chunk borders of every row fall into the same columns.

Rows may start inside a chunk, each at its own position, and may hold padding. Valid tokens are moved
together, then each row is shifted right by its own phase; the pairs of the window go in front. After
that the parallel forms know only columns, some of them empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.tokens import Tokens


@dataclass(frozen=True)
class Chunk:
    """Columns start..stop of the grid, all in one chunk; the first of them is its token `offset`."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Grid:
    q: Tensor  # [B, H, G, K]
    pairs: dict[str, Tensor]  # k, v, gates of pairs: [B, H, c-1 + G, ...], the halo first
    gates: dict[str, Tensor]  # [B, H, G, ...]
    valid: Tensor  # [B, G] bool: a token is written in this column
    present: Tensor  # [B, c-1 + G] bool: a pair is there
    chunks: list[Chunk]
    full: bool  # every column of every row holds a token
    level: bool  # every row begins on a chunk border
    shift: Tensor  # [B] columns before the first token of each row
    home: Tensor | None  # [B, T] the column of each token; None: column t
    window: dict[str, Tensor]  # the last c-1 pairs of each row, for the next state
    count: Tensor  # [B] tokens written

    def collect(self, y: Tensor, valid: Tensor | None) -> Tensor:
        """Bring [B, H, G, ...] back to the tokens' own order [B, H, T, ...], zero where not valid."""
        if self.home is None:
            return y
        y = _take(y, self.home)
        return y if valid is None else _mask(y, valid)


def lay_out(spec: MemorySpec, state: MemoryState, tokens: Tokens, chunk: int, fresh: bool) -> Grid:
    """The grid of a stretch. chunk: columns per chunk (or tile, for rules without an anchor);
    fresh: the state is known to be an initial one, so no position needs to be looked at."""
    fields = tokens.pair_fields(spec.pair_gates)
    order, count = _compact(tokens)
    low, high, shift = _phases(spec, state, fresh)
    columns, halo = tokens.count + high - low, spec.window.size - 1
    straight = order is None and low == high

    def place(x: Tensor, present: Tensor, size: int) -> Tensor:
        source = torch.arange(size, device=x.device) - shift.unsqueeze(1)
        return _mask(_take(x, source.clamp(0, x.shape[2] - 1)), present)

    compact = {n: f if order is None else _take(f, order) for n, f in fields.items()}
    pairs = {n: torch.cat([state.window[n], f], dim=2) for n, f in compact.items()}
    window = {
        n: _take(p, count.unsqueeze(1) + torch.arange(halo, device=count.device))
        for n, p in pairs.items()
    }
    valid = _columns(columns, shift, count)
    present = _columns(columns + halo, shift, halo + count)
    age = torch.arange(columns + halo, device=shift.device) - shift.unsqueeze(1) - halo
    present = present & (state.position.unsqueeze(1) + age >= 0)
    q, gates, home = tokens.q, tokens.gates, None
    if not straight:
        if order is not None:
            q, gates = _take(q, order), {n: _take(g, order) for n, g in gates.items()}
        q, gates = place(q, valid, columns), {n: place(g, valid, columns) for n, g in gates.items()}
        pairs = {n: place(p, present, columns + halo) for n, p in pairs.items()}
        home = _home(tokens, shift)
    first = min(chunk - low if not spec.online else chunk, columns)
    return Grid(
        q=q,
        pairs=pairs,
        gates=gates,
        valid=valid,
        present=present,
        chunks=_cut(columns, first, chunk, low),
        full=straight,
        level=low == high == 0,
        shift=shift,
        home=home,
        window=window,
        count=count,
    )


def _compact(tokens: Tokens) -> tuple[Tensor | None, Tensor]:
    """The order that brings valid tokens to the front [B, T] (None: already so), and their number [B]."""
    if tokens.valid is None:
        batch = tokens.q.shape[0]
        return None, torch.full((batch,), tokens.count, dtype=torch.int64, device=tokens.q.device)
    order = torch.argsort(tokens.valid.logical_not().to(torch.int8), dim=1, stable=True)
    return order, tokens.valid.sum(1)


def _phases(spec: MemorySpec, state: MemoryState, fresh: bool) -> tuple[int, int, Tensor]:
    """Smallest and largest phase inside the chunk over the rows, and each row's shift to the right.

    One look at the positions; under torch.compile none, at the price of one more, partly empty chunk.
    """
    chunk = spec.timing.chunk
    if spec.online or fresh:
        return 0, 0, torch.zeros_like(state.position)
    phase = state.position % chunk
    if torch.compiler.is_compiling():
        low, high = 0, chunk - 1
    else:
        low, high = int(phase.min()), int(phase.max())
    return low, high, phase - low


def _home(tokens: Tokens, shift: Tensor) -> Tensor:
    """The column of each token, [B, T]; for padding the column of some other token."""
    if tokens.valid is None:
        rank = torch.arange(tokens.count, device=shift.device).unsqueeze(0)
    else:
        rank = (tokens.valid.cumsum(1) - 1).clamp_min(0)
    return rank + shift.unsqueeze(1)


def _cut(columns: int, first: int, chunk: int, low: int) -> list[Chunk]:
    """Columns 0..columns cut into chunks; the first one holds `first` columns, from its token `low` on."""
    chunks = [Chunk(0, first, low)]
    while chunks[-1].stop < columns:
        start = chunks[-1].stop
        chunks.append(Chunk(start, min(start + chunk, columns), 0))
    return chunks


def _columns(size: int, shift: Tensor, count: Tensor) -> Tensor:
    """[B, size] bool: shift <= column < shift + count."""
    column = torch.arange(size, device=shift.device)
    return (column >= shift.unsqueeze(1)) & (column < (shift + count).unsqueeze(1))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x: [B, H, n, ...], index: [B, m] -> [B, H, m, ...], by row."""
    index = index.reshape(index.shape[0], 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _mask(x: Tensor, present: Tensor) -> Tensor:
    """Zero, whatever stood there (NaN too), where present [B, n] is False."""
    return torch.where(present.reshape(present.shape[0], 1, -1, *[1] * (x.dim() - 3)), x, 0.0)


def split(x: Tensor, chunks: list[Chunk]) -> tuple[Tensor, ...]:
    """The columns of each chunk, [B, H, T, ...]. Split at once: slicing one by one would make the
    backward pass fill a tensor of the whole length for every chunk."""
    return x.split([chunk.stop - chunk.start for chunk in chunks], dim=2)


def split_with_halo(x: Tensor, chunks: list[Chunk], halo: int) -> list[Tensor]:
    """The columns of each chunk with the `halo` columns before them, [B, H, halo + T, ...]."""
    before, rest = x[:, :, :halo], x[:, :, halo:]
    pieces = []
    for piece in split(rest, chunks):
        pieces.append(torch.cat([before, piece], dim=2) if halo else piece)
        before = pieces[-1][:, :, pieces[-1].shape[2] - halo :]
    return pieces
