"""Host side of the walk: one run per sequence, or many runs per sequence joined by a scan.

A chunk of a matrix memory is affine in the state, so a run of chunks is too: state' = T state + U. Where few
long sequences would leave the chip idle, every sequence is cut into runs; all T and U are found at once by
walking unit states and zero, a few small products give the state before each run, and all runs are walked
again with their true starts.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from atlas_lm.ops.backend import HALVES
from atlas_lm.ops.chunk_walk.kernels import (
    join_kernel,
    walk_backward_kernel,
    walk_forward_kernel,
)
from atlas_lm.ops.chunk_weights.record import ChunkWeights
from atlas_lm.ops.sequences import Sequences
from atlas_lm.ops.tiles import Tile, pick

PROGRAMS = 256  # walk this many runs side by side, if there are chunks enough
SHORTEST = 8  # chunks of a run
# Measured with 128 features. For wide features (more than 128) some tiles become wrong programs on the way to
# the device (docs/kernels.md, section 4); these were seen right.
TILES = {
    "walk_forward_kernel": Tile(64, 4, 2),
    "walk_forward_kernel momentum": Tile(32, 4, 2),
    "walk_forward_kernel wide": Tile(32, 8, 1),
    "walk_forward_kernel wide solved": Tile(32, 8, 2),
    "walk_forward_kernel fp32": Tile(16, 8, 1),
    "walk_backward_kernel": Tile(64, 4, 2),
    "walk_backward_kernel momentum": Tile(64, 8, 2),
    "walk_backward_kernel wide": Tile(32, 8, 1),
    "walk_backward_kernel wide solved": Tile(32, 8, 2),
    "walk_backward_kernel fp32": Tile(16, 8, 1),
}


@dataclass(frozen=True, eq=False)
class Runs:
    sequence: Tensor  # [NR] int32, NR = N * each
    first: Tensor  # [NR] int32, first chunk
    count: Tensor  # [NR] int32, chunks that hold tokens
    each: int  # runs per sequence


@dataclass(frozen=True, eq=False)
class Walked:
    borders: Tensor  # [NC, H, F, V], the memory before each chunk, transposed, in the inputs' dtype
    momentum_borders: Tensor | None
    memory: Tensor  # [N, H, V, F] fp32, after the last chunk
    momentum: Tensor | None
    anchor: Tensor  # [N, H, V, F] fp32, before the last chunk that holds tokens
    starts: list[Tensor | None]  # memory and momentum before each run, to walk again
    transition: Tensor | None  # [runs, N H, F or 2F, F or 2F] fp32, with several runs


@dataclass(frozen=True, eq=False)
class WalkedBack:
    """What is asked: of the state after each chunk, of the initial one, and of what moved it."""

    borders: list[Tensor | None]  # memory and momentum, [NC, H, F, V] in the inputs' dtype
    starts: list[Tensor | None]  # [N, H, V, F] fp32
    keep: Tensor  # [NC, H] fp32, of each chunk's last keep, by the way through the state
    push: Tensor | None  # [NC, H], of its last push
    tail_keep: Tensor | None  # [NC, H]


@dataclass(frozen=True, eq=False)
class Walk:
    """All that moves a state from border to border; see `kernels` for the formula."""

    sequences: Sequences
    x: Tensor  # [rows, H, F], keys' features
    right: Tensor  # [rows, H, V] values; or [NC, H, halo + b, V], solved
    keep: Tensor  # [NC, H, b] fp32, what is left of the memory at each token; the last one counts
    halo: int = 0
    left: Tensor | None = None  # [NC, H, halo + b, F], solved; None: x itself
    weights: ChunkWeights | None = None  # where errors are not weighted yet
    feedback: bool = True  # False: errors do not depend on the memory (the dot objective)

    @property
    def has_momentum(self) -> bool:
        return self.weights is not None and self.weights.push is not None

    @property
    def _parts(self) -> int:
        return 2 if self.has_momentum else 1

    def forward(self, memory: Tensor, momentum: Tensor | None = None) -> Walked:
        """memory, momentum: [N, H, V, F] fp32, before the first chunk."""
        runs = self._runs()
        given = [memory, momentum]
        if runs.each == 1:
            return self._walk(runs, [_transposed(s) for s in given], None)
        transition, gain = self._probe(runs)
        states = self._join(transition, gain, given)
        return self._walk(runs, self._part(states), transition)

    def again(self, walked_starts: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """The borders once more, from the states before each run."""
        walked = self._walk(self._runs(), walked_starts, None)
        return walked.borders, walked.momentum_borders

    def backward(
        self,
        transition: Tensor | None,
        queries: Tensor,
        q: Tensor | None,
        dy: Tensor,
        dstate: Sequence[Tensor | None],
        danchor: Tensor | None,
        borders: Sequence[Tensor | None],
    ) -> WalkedBack:
        """queries: [rows, H, F] effective queries   q: [rows, H, F], read with the momentum
        dstate: gradients of final memory and momentum, None: zero   danchor: of the anchor, or None
        borders: memory and momentum before each chunk, as `forward` found them
        """
        runs = self._runs()
        given = (queries, q, dy, danchor)
        if runs.each == 1:
            return self._walk_back(runs, [_transposed(s) for s in dstate], given, borders)
        assert transition is not None
        asked = self._launch_backward(runs, None, given, [None] * 7, probe=True)
        asked = asked.flatten(0, 1).unflatten(0, (runs.each, -1))
        states = self._join(transition.mT, asked, dstate, back=True)
        return self._walk_back(runs, self._part(states), given, borders)

    def _walk(self, runs: Runs, starts: list[Tensor | None], transition: Tensor | None) -> Walked:
        h, f, v = self._widths()
        count, number = self.sequences.count, runs.sequence.shape[0]
        shape = (self.sequences.chunks, h, f, v)
        pair, inner = range(self._parts), torch.float32
        borders = [self.x.new_empty(shape) for _ in pair]
        ends = [self.x.new_empty(number, h, v, f, dtype=inner) for _ in pair]
        anchor = self.x.new_empty(count, h, v, f, dtype=inner)
        out = [*_two(ends), *_two(borders), anchor]
        self._launch_forward(runs, starts, out, ends[0].transpose(2, 3), v, probe=False)
        last = [end[number - count :] for end in ends]  # the last run of each sequence
        memory, momentum = _two(last)
        assert memory is not None
        return Walked(borders[0], _two(borders)[1], memory, momentum, anchor, starts, transition)

    def _probe(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """Transition [runs, N H, F, F] and gain [runs, N H, F, V] of every run (2F with momentum)."""
        h, f, v = self._widths()
        block, rows = self._tile("walk_forward_kernel")["BV"], f * self._parts
        values = -(-v // block) * block
        width = values + -(-rows // block) * block
        ends = self.x.new_empty(runs.sequence.shape[0], h, rows, width, dtype=torch.float32)
        out = [*_two(list(ends.split(f, dim=2))), None, None, None]
        self._launch_forward(runs, [None, None], out, ends, width, probe=True)
        by_run = ends.flatten(0, 1).unflatten(0, (runs.each, -1))
        return by_run[..., values : values + rows], by_run[..., :v]

    def _join(
        self, transition: Tensor, gain: Tensor, state: Sequence[Tensor | None], back: bool = False
    ) -> Tensor:
        """The states between runs, [runs, N H, F or 2F, V], memory above momentum, transposed.
        state: [N, H, V, F] each, before the first run, or (back) after the last; None: zero"""
        runs, heads, rows, v = gain.shape
        states = gain.new_empty(runs, heads, rows, v)
        for part, given in zip(self._part(states[-1:] if back else states[:1]), state, strict=True):
            if part is not None:
                _ = part.zero_() if given is None else part.copy_(given.mT)
        join_kernel[(triton.cdiv(v, 16), heads)](
            transition, gain, states, runs, *transition.stride(), *gain.stride()[:3],
            R=rows, V=v, BR=max(16, triton.next_power_of_2(rows)), BV=16, BK=32, BACK=back,
            PRECISION="tf32x3" if self.x.dtype in HALVES else "ieee", num_warps=8, num_stages=2,
        )  # fmt: skip
        return states

    def _launch_forward(
        self,
        runs: Runs,
        starts: list[Tensor | None],
        out: list[Tensor | None],
        end: Tensor,
        width: int,
        *,
        probe: bool,
    ) -> None:
        h, f, v = self._widths()
        tile = self._tile("walk_forward_kernel")
        s = self.sequences
        blocks = -(-width // tile["BV"])
        walk_forward_kernel[(blocks * h * runs.sequence.shape[0],)](
            self.x, self.left, self.right, *self._weights(), *starts, *out,
            runs.sequence, runs.first, runs.count,
            s.pair_start, s.first_chunk, s.last_chunk, s.length, s.past,
            H=h, F=f, V=v, **_strides("IN", starts[0]), **_strides("OUT", end), BLOCKS=blocks,
            **tile, **self._kind(), PROBE=probe,
        )  # fmt: skip

    def _walk_back(
        self,
        runs: Runs,
        dends: list[Tensor | None],
        given: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
        borders: Sequence[Tensor | None],
    ) -> WalkedBack:
        h, f, v = self._widths()
        chunks, pair = self.sequences.chunks, range(self._parts)
        asked = _two([self.x.new_empty(chunks, h, f, v) for _ in pair])
        blocks = -(-v // self._tile("walk_backward_kernel")["BV"])
        shape = (chunks, h, blocks, f)
        moved = [self.x.new_empty(shape, dtype=torch.float32) for _ in range(2 * self._parts - 1)]
        out = [*asked, *borders, *moved, *[None] * (3 - len(moved))]
        begins = self._launch_backward(runs, dends, given, out, probe=False)
        first = self._part(begins[: self.sequences.count])  # the first run of each sequence
        keep, push, tail_keep = [*(x.sum((2, 3)) for x in moved), None, None][:3]
        assert keep is not None
        starts = [None if d is None else d.mT for d in first]
        return WalkedBack(asked, starts, keep, push, tail_keep)

    def _launch_backward(
        self,
        runs: Runs,
        dends: list[Tensor | None] | None,
        given: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
        out: Sequence[Tensor | None],
        *,
        probe: bool,
    ) -> Tensor:
        """What is asked of each run's begin, memory above momentum [NR, H, F or 2F, V].

        out: filled with what is asked of each chunk's state (2); read: the borders (2); filled: sums (3)"""
        h, f, v = self._widths()
        tile, s = self._tile("walk_backward_kernel"), self.sequences
        queries, q, dy, danchor = given
        number = runs.sequence.shape[0]
        found = self.x.new_empty(number, h, f * self._parts, v, dtype=torch.float32)
        first = None if dends is None else dends[0]
        blocks = -(-v // tile["BV"])
        walk_backward_kernel[(blocks * h * number,)](
            self.x, self.left, *self._weights(), queries, q, dy, *(dends or [None, None]),
            *_two(list(found.split(f, dim=2))), *out[:2], danchor, *out[2:],
            runs.sequence, runs.first, runs.count,
            s.start, s.pair_start, s.first_chunk, s.last_chunk, s.length, s.past,
            H=h, F=f, V=v, **_strides("IN", first), **_strides("OUT", found), BLOCKS=blocks,
            **tile, **self._kind(), PROBE=probe, GIVEN=first is not None, ANCHOR=danchor is not None,
        )  # fmt: skip
        return found

    def _runs(self) -> Runs:
        s = self.sequences
        block = self._tile("walk_forward_kernel")["BV"]
        here = -(-self.right.shape[-1] // block) * self.x.shape[1] * s.count
        each = max(1, min(PROGRAMS // here, s.most // SHORTEST)) if s.even else 1
        return cut(s, 2 ** int(math.log2(each)))

    def _widths(self) -> tuple[int, int, int]:
        return self.x.shape[1], self.x.shape[2], self.right.shape[-1]

    def _weights(self) -> tuple[Tensor | None, ...]:
        w = self.weights
        if w is None:
            return None, None, self.keep, None, None
        return w.mix, w.tail_mix, self.keep, w.push, w.tail_keep

    def _kind(self) -> dict[str, Any]:
        half = self.x.dtype in HALVES
        return dict(
            **rows_of(self.sequences.chunk, self.halo),
            CHUNK=self.sequences.chunk,
            FEEDBACK=self.feedback,
            WEIGHTED=self.weights is not None,
            MOMENTUM=self.has_momentum,
            PRECISION="tf32" if half else "ieee",
        )

    def _tile(self, kernel: str) -> dict[str, Any]:
        """Launch options. The state of a program, [BF, BV] or two of them, stays in registers."""
        _, f, v = self._widths()
        traits = dict(
            momentum=self.has_momentum,
            solved=self.weights is None,
            wide=f > 128,
            fp32=self.x.dtype not in HALVES,
        )
        wide = max(16, triton.next_power_of_2(f))
        return dict(BF=wide) | pick(TILES, kernel, traits).options(v)

    def _part(self, states: Tensor) -> list[Tensor | None]:
        """[..., H, F or 2F, V], leading axes flat or not -> memory and momentum [NR, H, F, V]"""
        rows = states.reshape(-1, self.x.shape[1], *states.shape[-2:])
        return _two(list(rows.split(self.x.shape[2], dim=-2)))


@functools.lru_cache(maxsize=32)
def cut(s: Sequences, each: int) -> Runs:
    """Every sequence in `each` runs of chunks; run r of all sequences together, before run r + 1."""
    size = -(-s.most // each)
    run = torch.arange(each, dtype=torch.int32, device=s.length.device).unsqueeze(1)
    chunks = (s.length + s.chunk - 1) // s.chunk
    number = torch.arange(s.count, dtype=torch.int32, device=s.length.device)
    return Runs(
        sequence=number.repeat(each),
        first=(s.first_chunk[:-1] + run * size).flatten(),
        count=(chunks - run * size).clamp(0, size).flatten(),
        each=each,
    )


def rows_of(chunk: int, halo: int) -> dict[str, int]:
    """How the halo + chunk pairs of a chunk lie in tiles: one of halo + chunk where that is a power of
    two, else a main tile and a halo tile."""
    if halo == chunk:
        return dict(ROWS=2 * chunk, OFF=chunk, HALO=0)
    return dict(ROWS=chunk, OFF=0, HALO=halo)


def _two(found: list[Tensor] | list[Tensor | None]) -> list[Tensor | None]:
    return [*found, None, None][:2]


def _transposed(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(2, 3)


def _strides(name: str, state: Tensor | None) -> dict[str, int]:
    """Of a head, a feature and a value, known to the compiler: state [NR, H, F, V], NR and H dense."""
    if state is None:
        return {f"{name}_{axis}": 0 for axis in "HFV"}
    assert state.stride(0) == state.shape[1] * state.stride(1) or state.shape[0] == 1
    return dict(zip((f"{name}_H", f"{name}_F", f"{name}_V"), state.stride()[1:], strict=True))
