"""Host side that all kernels of a two-layer memory share: what they are compiled for, how they are cut and
launched, and the weights as they hold them: hidden units as rows, the last layer transposed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas_lm.ops.backend import HALVES, interpreted
from atlas_lm.ops.mlp_memory.gather import gather_kernel
from atlas_lm.ops.mlp_memory.plain import normed
from atlas_lm.ops.mlp_memory.record import MLPState, Problem, Weights
from atlas_lm.ops.mlp_memory.room import UNITS, Room, edge_of, padded
from atlas_lm.ops.sequences import Sequences
from atlas_lm.ops.tiles import pick

# w0 [..., D, F], w1 transposed [..., D, V] and the gate [..., D, F], or none at all
Columns = tuple[Tensor, ...]


@dataclass(frozen=True)
class Block:
    """How a kernel is cut: hidden units and features that a program holds at a time."""

    hidden: int
    features: int
    warps: int
    stages: int = 1


BLOCKS = {
    "walk_forward_kernel": Block(64, 64, 4),
    "walk_forward_kernel fp32": Block(32, 32, 8),
    "reads_forward_kernel": Block(64, 64, 4),
    "reads_forward_kernel fp32": Block(32, 32, 8),
    "units_backward_kernel": Block(64, 64, 4),
    "units_backward_kernel fp32": Block(32, 32, 8),
    "walk_backward_kernel": Block(64, 64, 4),
    "walk_backward_kernel fp32": Block(32, 32, 8),
    "tokens_backward_kernel": Block(64, 64, 4),
    "tokens_backward_kernel wide": Block(64, 64, 8),
    "tokens_backward_kernel fp32": Block(32, 32, 8),
    "stride_forward_kernel": Block(64, 64, 4),
    "stride_forward_kernel fp32": Block(32, 32, 8),
    "stride_backward_kernel": Block(64, 64, 4),
    "stride_backward_kernel fp32": Block(32, 32, 8),
    "pairs_backward_kernel": Block(64, 64, 4),
    "pairs_backward_kernel fp32": Block(32, 32, 8),
    "faded_forward_kernel": Block(64, 64, 4),
    "faded_forward_kernel fp32": Block(32, 32, 8),
    "faded_backward_kernel": Block(64, 64, 4),
    "faded_backward_kernel fp32": Block(32, 32, 8),
}
CROWDED = (
    "reads_forward_kernel",
    "units_backward_kernel",
)  # hold all weights and tokens side by side
PROGRAMS = 256  # of a walk, that fill a GPU
ROOM = 128  # columns that a walk can hold in registers
# their programs wait for each other, which interpreted ones, run one after the other, cannot
WALKS = (
    "walk_forward_kernel",
    "walk_backward_kernel",
    "stride_forward_kernel",
    "stride_backward_kernel",
)


@dataclass(frozen=True, eq=False)
class Shape:
    """What kernels are compiled for, and where sequences lie."""

    sequences: Sequences
    rows: int  # of queries
    features: int
    hidden: int
    values: int
    window: int
    weights: int  # 2, or 3 with a gate
    momentum: bool
    start: bool
    feedback: bool
    skip: bool
    normed: bool
    activation: str

    @classmethod
    def of(cls, p: Problem) -> "Shape":
        features, hidden, values = p.sizes
        return cls(
            p.sequences, p.q.shape[0], features, hidden, values, p.window, len(p.memory.given),
            p.momentum is not None, p.start is not None, p.objective == "l2", p.skip and p.norm is None,
            p.norm is not None, p.activation,
        )  # fmt: skip

    @property
    def edge(self) -> int:
        """Pairs before a chunk that its tensors hold."""
        return edge_of(self.window)

    def room(self, like: Tensor) -> Room:
        states = 1 + self.momentum + self.start
        return Room(
            self.sequences.chunk, self.edge, self.features, self.values, self.weights, states,
            like.element_size()
        )  # fmt: skip

    @property
    def adds_keys(self) -> bool:
        """Whether errors depend on a pair's features by themselves."""
        return (self.skip or self.normed) and self.feedback

    def by_chunk(self, like: Tensor, rows: int) -> Tensor:
        """[NC, H, rows, PAIRS], empty, with the dtype and heads of queries or keys"""
        pairs = self.sequences.chunk + self.edge
        return like.new_empty(self.sequences.chunks, like.shape[1], rows, pairs)

    def cores(self, like: Tensor) -> Columns:
        """What the last layer says of each pair, (one,) with a norm: [NC, H, V, PAIRS]"""
        return (self.by_chunk(like, self.values),) if self.normed else ()

    def parts(self, walk: Any, like: Tensor) -> int:
        """In how many parts a backward pass goes over sequences, whose tiles then are not all there at once:
        as many as leave each of them enough programs to walk."""
        programs = self.sequences.count * like.shape[1] * slices(self.options(walk, like))
        return max(1, programs // PROGRAMS)

    def split(self, tensors: Any, start: bool = False) -> tuple[Columns, Columns, Columns]:
        """What stands in a row: memory, momentum and start; or memory, anchor and momentum."""
        n, tensors = self.weights, tuple(tensors)
        second = n if self.momentum or not start else 0
        return tensors[:n], tensors[n : n + second], tensors[n + second :]

    def options(self, kernel: Any, like: Tensor) -> dict[str, Any]:
        """Launch options."""
        half = like.dtype in HALVES
        block = pick(BLOCKS, kernel.__name__, {"fp32": not half, "wide": self.features > 128})
        hidden = padded(self.hidden)
        if kernel.__name__ in CROWDED:
            hidden = min(self.room(like).units(block.hidden) or UNITS[-1], hidden)
        elif not (kernel.__name__ in WALKS and interpreted()):
            hidden = min(block.hidden, hidden)
        return dict(
            H=like.shape[1], F=self.features, D=self.hidden, V=self.values,
            BF=min(block.features, padded(self.features)), BV=padded(self.values), BD=hidden,
            CHUNK=self.sequences.chunk, EDGE=self.edge, BE=padded(self.edge) if self.edge else 0,
            WINDOW=self.window, PRECISION="tf32" if half else "ieee",
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    @property
    def held(self) -> bool:
        """Whether a walk has room for the rows of all weights in its registers, 64 units and fp32, besides
        its tiles. With a momentum, which lies in memory, it has not."""
        columns = padded(self.features) * (self.weights - 1) + padded(self.values)
        return not self.momentum and columns <= ROOM

    def bends(self, like: Tensor) -> dict[str, Any]:
        """What kernels are told that compute the activation."""
        return dict(ACTIVATION=self.activation, FAST=self.fast(like))

    def fast(self, like: Tensor) -> bool:
        """Whether kernels may use single instructions of the GPU: results are rounded to halves, and
        compiled."""
        return like.dtype in HALVES and not interpreted()


def pair_gradient(shape: Shape, like: Tensor, width: int) -> Tensor:
    """[rows, H, width] for `gather_pairs` to fill; zero where no chunk sees a row"""
    covered = shape.sequences.full and like.shape[0] == shape.rows
    return (like.new_empty if covered else like.new_zeros)(*like.shape[:2], width)


def gather_pairs(shape: Shape, out: Tensor, part: Tensor, more: Columns, sign: float) -> None:
    """Gradients by chunk -> of the flat pairs [rows, H, width]"""
    s, width = shape.sequences, out.shape[-1]
    gather_kernel[(s.chunks * out.shape[1],)](
        out, (part, *more), s.pair_start, s.first_chunk, s.sequence, s.length, s.past, H=out.shape[1],
        WIDTH=width, BLOCK=padded(width), EDGE=shape.edge, CHUNK=s.chunk, SIGN=sign,
    )  # fmt: skip


def per_chunk(
    kernel: Any, shape: Shape, q: Tensor, tensors: tuple[Any, ...], programs: int = 1, **more: Any
) -> None:
    """Launch so many programs for every chunk and head."""
    s = shape.sequences
    kernel[(s.chunks * q.shape[1] * programs,)](
        *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
        **more, **shape.options(kernel, q),
    )  # fmt: skip


def mail(
    options: dict[str, Any], like: Tensor, count: int, turns: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the slices of a head post their parts, and count them; for each launch whose turn it is, in 16
    bytes: pointers that are aligned alike get one kernel."""
    groups = count * options["H"]
    size = 2 * slices(options) * options["BV"] * (options["CHUNK"] + options["BE"])
    box = like.new_empty(groups * size if slices(options) > 1 else 0, dtype=torch.float32)
    counts = like.new_zeros(4 * turns + groups, dtype=torch.int32)
    return box, counts[4 * turns :], counts[: 4 * turns].view(turns, 4)


def slices(options: dict[str, Any]) -> int:
    return -(-options["D"] // options["BD"])


def asked(grads: tuple[Tensor | None, ...], like: Columns, count: int) -> Columns:
    """Gradients of states [N, H, ...] fp32, in memory of their own, zero where none is given."""
    return tuple(
        x.new_zeros(count, *x.shape[1:], dtype=torch.float32) if g is None else copied(g)
        for g, x in zip(grads, like, strict=True)
    )


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def copies(given: Columns) -> Columns:
    return tuple(copied(w) for w in given)


def empty_like(given: Columns) -> Columns:
    return tuple(torch.empty_like(w) for w in given)


def narrow(given: Columns, like: Tensor) -> Columns:
    return tuple(w.to(like.dtype) for w in given)


def columns_of(weights: Weights | None) -> Columns:
    if weights is None:
        return ()
    w0, w1, *gate = weights.given
    return tuple(w.contiguous() for w in (w0, w1.mT, *gate))


def weights_of(columns: Columns) -> Weights | None:
    if not columns:
        return None
    w0, w1, *gate = columns
    return Weights(w0, w1.mT, *gate)


def norm_parts(shape: Shape, like: Tensor) -> Columns:
    """What chunks ask of scale and bias, (one,) with a norm: [NC, H, 2, V]; zero of those without tokens"""
    size = (shape.sequences.chunks, like.shape[1], 2, shape.values)
    return (like.new_zeros(size, dtype=torch.float32),) if shape.normed else ()


def through_norm(p: Problem, read: Tensor) -> Tensor:
    """Of what the last layer says of queries, with a norm: q + LN(read) * scale + bias."""
    if p.norm is None:
        return read
    y, s = normed(read.float(), p.q, p.norm).to(read.dtype), p.sequences
    if s.full:
        return y
    place = torch.arange(y.shape[0] // s.count, device=y.device)  # rows of a batch, of one size
    return torch.where((place < s.length.unsqueeze(1)).view(-1, 1, 1), y, 0.0)


def state_of(p: Problem, end: Columns, anchor: Columns, momentum: Columns) -> MLPState:
    """From what kernels leave behind. A row without tokens passes no border: its anchor is its memory."""
    memory, last, pushed = (weights_of(columns) for columns in (end, anchor, momentum))
    assert memory is not None and last is not None
    if not p.sequences.full:
        idle = (p.sequences.length == 0)[:, None, None, None]
        last = last.map(lambda a, m: torch.where(idle, m, a), p.memory)
    return MLPState(memory, last, pushed)
