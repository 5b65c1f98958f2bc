"""MAC, memory as context: a segment attends to itself and to what the memory says about it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.blocks.persistent import Persistent
from atlas_lm.layers.attention import attend
from atlas_lm.layers.rotary import rotate
from atlas_lm.layers.state import LayerState, inside, outside
from atlas_lm.layers.tail import advance, counted
from atlas_lm.memory import MemoryState, Trace


class MemoryAsContext(Mixer):
    """Per segment of C tokens, M_0 the memory from before the segment:

        h_t = read of M_0 with the query of x_t                          (no write)
        y   = causal attention over [persistent, h, x]                   (within the segment)
        o_t = y_t * sigmoid(read of M_t at y_t), M_t written with y up to t

    Token t sees h_j and x_j for j <= t only: h_j is asked with x_j, so a later one would be the future.
    The parts of an open segment are kept in C slots each, a row's slot being its place in the segment.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.segment = parts.segment
        self.persistent = Persistent(parts.persistent, parts.width)
        self.memory = parts.memory()
        self.attention = parts.attention(None)
        self.read_norm = parts.norm()
        self.write_norm = parts.norm()

    def start(self, batch: int, like: Tensor) -> LayerState:
        memory, tail = self.memory.start(batch, like)
        queries = self.memory.sizes[0]
        slots = like.new_zeros(
            batch, self.segment, self.attention.kv_heads, self.attention.head_dim
        )
        tails = {"conv": tail, "ask": tail[..., :queries].clone()}
        tails |= {name: slots.clone() for name in SLOTS}
        tails |= outside("start", {n: weight.clone() for n, weight in memory.memory.items()})
        tails["position"] = memory.position.clone()
        return LayerState(memory=memory, tails=tails)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, LayerState]:
        fresh = state is None
        state = self.start(x.shape[0], x) if state is None else state
        tails, memory = dict(state.tails), state.memory
        position = tails["position"]
        grid = _lay_out(x, position, count, self.segment, fresh)
        outputs = []
        for piece in grid.pieces(x):
            begun = inside("start", tails)
            assert memory is not None
            tails |= outside("start", _select(piece.border, memory.memory, begun))
            y, memory, tails = self._piece(piece, memory, tails, watch)
            outputs.append(y)
        tails["position"] = advance(position, x.shape[1], count)
        return grid.collect(outputs), LayerState(memory=memory, tails=tails)

    def _piece(
        self,
        piece: "Piece",
        memory: MemoryState,
        tails: dict[str, Tensor],
        watch: list[Trace] | None,
    ) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
        """One stretch inside one segment."""
        before = replace(memory, memory=inside("start", tails))
        h, ask = self.memory.read(piece.x, before, tails["ask"], piece.count)
        slots = self._fill(piece, self.read_norm(h), tails)
        y = self._attend(piece, slots)
        m, memory, conv = self.memory(self.write_norm(y), memory, tails["conv"], piece.count, watch)
        return y * torch.sigmoid(m), memory, tails | slots | {"ask": ask, "conv": conv}

    def _fill(self, piece: "Piece", h: Tensor, tails: dict[str, Tensor]) -> dict[str, Tensor]:
        """The slots of the segment, with these tokens in theirs."""
        found = {}
        for name, tokens, first in (("read", h, 0), ("text", piece.x, self.segment)):
            k, v = self.attention.pairs(tokens)
            k = self._turn(k, piece.slots + first)
            found[f"{name}.k"] = _write(tails[f"{name}.k"], k, piece)
            found[f"{name}.v"] = _write(tails[f"{name}.v"], v, piece)
        return found

    def _attend(self, piece: "Piece", slots: dict[str, Tensor]) -> Tensor:
        q = self._turn(self.attention.queries(piece.x), piece.slots + self.segment)
        k = torch.cat([slots["read.k"], slots["text.k"]], dim=1)
        v = torch.cat([slots["read.v"], slots["text.v"]], dim=1)
        place = torch.arange(self.segment, device=q.device)
        mask = (place <= piece.slots.unsqueeze(-1)).repeat(1, 1, 2)  # [B or 1, w, 2C]
        if held := len(self.persistent):
            first_k, first_v = self.attention.pairs(self.persistent.rows(q.shape[0], q))
            places = torch.arange(-held, 0, device=q.device).unsqueeze(0)
            k = torch.cat([self._turn(first_k, places), k], dim=1)
            v = torch.cat([first_v, v], dim=1)
            mask = torch.cat([mask.new_ones(*mask.shape[:2], held), mask], dim=-1)
        return self.attention.merge(attend(q, k, v, mask))

    def _turn(self, x: Tensor, slots: Tensor) -> Tensor:
        """Places are those of [persistent, h, x], the same in every segment."""
        return rotate(x, slots + len(self.persistent), self.attention.rope_theta)


SLOTS = ("read.k", "read.v", "text.k", "text.v")


@dataclass(frozen=True)
class Piece:
    """Up to C tokens of each row, all in one segment."""

    x: Tensor  # [B, w, D]
    count: Tensor | None  # [B] how many of them count, first in each row; None: all
    slots: Tensor  # [B or 1, w] the place of each in its segment
    border: Tensor | bool  # the rows in which a segment begins: all, none, or [B] bool


@dataclass(frozen=True)
class Together:
    """All rows stand at one place of their segment: they are cut in the same columns."""

    tokens: int
    segment: int
    phase: int
    count: Tensor | None

    def pieces(self, x: Tensor) -> Iterator[Piece]:
        first = min(self.segment - self.phase, self.tokens)
        sizes = [first] + [self.segment] * ((self.tokens - first) // self.segment)
        sizes += [self.tokens - sum(sizes)] if sum(sizes) < self.tokens else []
        done, slot = 0, self.phase
        for part in x.split(sizes, dim=1):
            size = part.shape[1]
            count = None if self.count is None else (self.count - done).clamp(0, size)
            border: Tensor | bool = slot == 0
            if border and count is not None:
                border = count > 0
            yield Piece(part, count, slot + torch.arange(size, device=x.device)[None], border)
            done, slot = done + size, 0

    def collect(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class Apart:
    """Rows stand at different places: piece i of a row is what falls into its i-th segment from here."""

    tokens: int
    segment: int
    phase: Tensor  # [B]
    number: int  # of pieces
    count: Tensor | None

    def pieces(self, x: Tensor) -> Iterator[Piece]:
        column = torch.arange(self.segment, device=x.device)
        for i in range(self.number):
            first, following = self._first(i), self._first(i + 1)
            end = following if self.count is None else torch.minimum(following, self.count)
            count = (end.clamp_max(self.tokens) - first).clamp_min(0)
            slot = self.phase if i == 0 else torch.zeros_like(self.phase)
            index = (first[:, None] + column).clamp_max(self.tokens - 1)
            taken = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            yield Piece(taken, count, slot[:, None] + column, (count > 0) & (slot == 0))

    def collect(self, outputs: list[Tensor]) -> Tensor:
        y = torch.cat(outputs, dim=1)  # [B, number * C, D]
        token = torch.arange(self.tokens, device=y.device)
        place = self.phase.unsqueeze(1) + token
        # the first piece of a row begins at column 0, though at slot `phase`
        index = torch.where(place < self.segment, token, place)
        return y.gather(1, index.unsqueeze(-1).expand(-1, -1, y.shape[-1]))

    def _first(self, i: int) -> Tensor:
        """The first token of piece i in each row, which may lie beyond the end."""
        return (i * self.segment - self.phase).clamp_min(0)


def _lay_out(
    x: Tensor, position: Tensor, count: Tensor | None, segment: int, fresh: bool
) -> Together | Apart:
    """One look at the positions; under torch.compile none, at the price of one more, partly empty piece."""
    tokens, phase = x.shape[1], position % segment
    if fresh:
        low = high = 0
    elif torch.compiler.is_compiling():
        low, high = 0, segment - 1
    else:
        low, high = int(phase.min()), int(phase.max())
    if low == high:
        return Together(tokens, segment, low, count)
    return Apart(tokens, segment, phase, -(-(tokens + high) // segment), count)


def _write(slots: Tensor, new: Tensor, piece: Piece) -> Tensor:
    """Put the tokens that count into their slots."""
    size, valid = slots.shape[1], counted(piece.count, new.shape[1])
    if new.shape[1] == size and valid is None:
        return new
    index = piece.slots.expand(new.shape[0], -1)
    if valid is not None:
        index = torch.where(valid, index, size)  # into one slot too many, dropped below
    room = torch.cat([slots, torch.zeros_like(slots[:, :1])], dim=1)
    return room.scatter(1, index[..., None, None].expand_as(new), new)[:, :size]


def _select(
    rows: Tensor | bool, new: dict[str, Tensor], old: dict[str, Tensor]
) -> dict[str, Tensor]:
    if isinstance(rows, bool):
        return dict(new) if rows else old
    return {n: torch.where(rows[:, None, None, None], new[n], old[n]) for n in old}
