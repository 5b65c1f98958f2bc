"""Host side of the fused form: the walk, then all chunks at once; backwards the other way round."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES
from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights
from atlas_lm.ops.mlp_memory.reads import reads_backward_kernel, reads_forward_kernel
from atlas_lm.ops.mlp_memory.record import MLPState, Problem, Weights
from atlas_lm.ops.mlp_memory.walk import gather_kernel, walk_backward_kernel, walk_forward_kernel
from atlas_lm.ops.sequences import Sequences
from atlas_lm.ops.tiles import pick

Columns = tuple[Tensor | None, ...]  # w0, w1, gate
NONE: Columns = (None, None, None)


@dataclass(frozen=True)
class Block:
    """How a kernel is cut: hidden units and features that a program holds at a time."""

    hidden: int
    features: int
    warps: int
    stages: int = 1


BLOCKS = {
    "walk_forward_kernel": Block(64, 64, 8),
    "walk_forward_kernel fp32": Block(32, 32, 8),
    "walk_backward_kernel": Block(64, 64, 8),
    "walk_backward_kernel fp32": Block(32, 32, 8),
    "reads_forward_kernel": Block(32, 64, 8),
    "reads_forward_kernel fp32": Block(32, 32, 8),
    "reads_backward_kernel": Block(32, 64, 8),
    "reads_backward_kernel fp32": Block(32, 32, 8),
}


WALKS = (walk_forward_kernel, walk_backward_kernel)


def one_by_one(like: Tensor) -> bool:
    """Interpreted or emulated programs run one after the other, so none can wait for another's part."""
    return not like.is_cuda


def mlp_memory_fused(problem: Problem) -> tuple[Tensor, MLPState]:
    """`mlp_memory` by Triton kernels."""
    p, s = problem, problem.sequences
    shape = Shape.of(p)
    with torch.cuda.device_of(p.q):  # kernels run on the current device
        weights = chunk_weights(p.eta, p.log_alpha, p.theta, p.gamma, s, halo=shape.edge)
        y, *state = _MLPMemory.apply(
            shape, p.q.contiguous(), p.k.contiguous(), p.v.contiguous(), *weights,
            *_columns(p.memory), *_columns(p.momentum), *_columns(p.start),
        )  # fmt: skip
    memory, anchor, momentum = (Weights(*state[at : at + 3]) for at in (0, 3, 6))
    if not s.full:  # a row without tokens passes no border
        idle = (s.length == 0)[:, None, None, None]
        anchor = anchor.map(lambda a, m: torch.where(idle, m, a), p.memory)
    return y, MLPState(memory, anchor, None if p.momentum is None else momentum)


@dataclass(frozen=True, eq=False)
class Shape:
    """What kernels are compiled for, and where sequences lie."""

    sequences: Sequences
    rows: int  # of queries
    features: int
    hidden: int
    values: int
    window: int
    gated: bool
    momentum: bool
    start: bool
    feedback: bool
    skip: bool
    activation: str

    @classmethod
    def of(cls, p: Problem) -> "Shape":
        features, hidden, values = p.sizes
        return cls(
            p.sequences, p.q.shape[0], features, hidden, values, p.window, p.memory.gate is not None,
            p.momentum is not None, p.start is not None, p.objective == "l2", p.skip, p.activation,
        )  # fmt: skip

    @property
    def edge(self) -> int:
        """Pairs before a chunk that its tensors hold: those of the window, in sixteens."""
        return -(-(self.window - 1) // 16) * 16

    @property
    def pairs(self) -> int:
        return self.sequences.chunk + self.edge

    def options(self, kernel: Any, like: Tensor) -> dict[str, Any]:
        """Launch options."""
        half = like.dtype in HALVES
        block = pick(BLOCKS, kernel.__name__, {"fp32": not half})
        hidden = _padded(self.hidden)
        if not (kernel in WALKS and one_by_one(like)):
            hidden = min(block.hidden, hidden)
        return dict(
            H=like.shape[1], F=self.features, D=self.hidden, V=self.values,
            BF=min(block.features, _padded(self.features)), BV=_padded(self.values),
            BD=hidden, N=triton.next_power_of_2(self.pairs), PAIRS=self.pairs, CHUNK=self.sequences.chunk,
            WINDOW=self.window, GATED=self.gated, SKIP=self.skip, ACTIVATION=self.activation,
            FAST=half, MOMENTUM=self.momentum, START=self.start, PRECISION="tf32" if half else "ieee",
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip


class _MLPMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        weights = ChunkWeights(*rest[:5])
        memory, momentum, start = rest[5:8], rest[8:11], rest[11:14]
        end, end_momentum, anchor, borders, momentum_borders, errors = _walk(
            shape, k, v, weights, memory, momentum, start
        )
        y = (torch.empty if shape.sequences.full else torch.zeros)(
            *q.shape[:2], shape.values, dtype=q.dtype, device=q.device
        )
        narrow = _narrow(start, q)
        _per_chunk(
            reads_forward_kernel, shape, q,
            (q, k, weights.mix, weights.keep, weights.push, borders, momentum_borders, narrow, errors, y),
        )  # fmt: skip
        ctx.shape = shape
        ctx.save_for_backward(q, k, *weights, *borders, *momentum_borders, *start, errors)
        ctx.set_materialize_grads(False)
        return y, *end, *anchor, *end_momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> Any:
        shape: Shape = ctx.shape
        q, k, *saved = ctx.saved_tensors
        weights = ChunkWeights(*saved[:5])
        borders, momentum_borders, start = (tuple(saved[at : at + 3]) for at in (5, 8, 11))
        errors = saved[14]
        dy = q.new_zeros(*q.shape[:2], shape.values) if dy is None else dy.contiguous()
        back = _reads_back(shape, q, k, weights, borders, momentum_borders, start, errors, dy)
        dends = dstate[:3], dstate[6:9]
        dk, dv, dstarts = _walk_back(
            shape, k, weights, borders, momentum_borders, start, errors, back, dends, dstate[3:6]
        )
        dweights = (back.mix, back.keep, back.push, back.tail_mix, back.tail_keep)
        return None, back.q, dk, dv, *dweights, *dstarts


@dataclass(eq=False)
class _Back:
    """Gradients on their way: of queries and coefficients, and what the reads ask, by chunk."""

    q: Tensor
    mix: Tensor
    keep: Tensor
    push: Tensor | None
    borders: Columns
    momentum_borders: Columns
    start: Columns  # [NC, H, ...]
    units: Tensor
    gates: Tensor | None
    us: Tensor
    errors: Tensor
    hidden: Tensor
    slopes: Tensor
    gate_slopes: Tensor | None
    x: Tensor
    tail_mix: Tensor | None = None
    tail_keep: Tensor | None = None


def _walk(
    shape: Shape,
    k: Tensor,
    v: Tensor,
    weights: ChunkWeights,
    memory: Columns,
    momentum: Columns,
    start: Columns,
) -> tuple[Columns, Columns, Columns, Columns, Columns, Tensor]:
    """End, its momentum, anchor; borders, those of the momentum; errors."""
    s, heads = shape.sequences, k.shape[1]
    borders, momentum_borders = _borders(s, k, memory), _borders(s, k, momentum)
    end, end_momentum = (
        tuple(None if w is None else w.clone(memory_format=torch.contiguous_format) for w in given)
        for given in (memory, momentum)
    )
    anchor = tuple(None if w is None else torch.empty_like(w) for w in end)
    make = k.new_empty if s.full else k.new_zeros
    errors = make(s.chunks, heads, shape.pairs, shape.values)
    options = shape.options(walk_forward_kernel, k)
    mail, arrived = _mail(options, k, s.count)
    walk_forward_kernel[(s.count * heads * _slices(options),)](
        k, v, *weights, end, end_momentum, start, borders, momentum_borders, anchor, errors, mail, arrived,
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, **options,
    )  # fmt: skip
    return end, end_momentum, anchor, borders, momentum_borders, errors


def _reads_back(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    weights: ChunkWeights,
    borders: Columns,
    momentum_borders: Columns,
    start: Columns,
    errors: Tensor,
    dy: Tensor,
) -> _Back:
    s, heads = shape.sequences, q.shape[1]
    fill = torch.empty_like if s.full else torch.zeros_like

    def by_chunk(width: int, wanted: bool = True) -> Tensor | None:
        return q.new_empty(s.chunks, heads, shape.pairs, width) if wanted else None

    dstart = (
        tuple(None if b is None else fill(b) for b in borders) if shape.start else NONE
    )
    back = _Back(
        q=fill(q), mix=fill(weights.mix), keep=fill(weights.keep),
        push=None if weights.push is None else fill(weights.push),
        borders=_like(borders), momentum_borders=_like(momentum_borders), start=dstart,
        units=by_chunk(shape.hidden), gates=by_chunk(shape.hidden, shape.gated),
        us=by_chunk(shape.hidden), errors=by_chunk(shape.values), hidden=by_chunk(shape.hidden),
        slopes=by_chunk(shape.hidden), gate_slopes=by_chunk(shape.hidden, shape.gated),
        x=by_chunk(shape.features),
    )  # type: ignore[arg-type]  # fmt: skip
    options = shape.options(reads_backward_kernel, q)
    cells = s.chunks * heads * s.chunk * shape.features if options["F"] > options["BF"] else 1
    scratch = q.new_zeros(cells, dtype=torch.float32)
    _per_chunk(
        reads_backward_kernel, shape, q,
        (q, k, weights.mix, weights.keep, weights.push, borders, momentum_borders, _narrow(start, q),
         errors, dy, back.q, back.mix, back.keep, back.push, back.borders, back.momentum_borders, dstart,
         back.units, back.gates, back.us, back.errors, back.hidden, back.slopes, back.gate_slopes, back.x,
         scratch),
    )  # fmt: skip
    return back


def _walk_back(
    shape: Shape,
    k: Tensor,
    weights: ChunkWeights,
    borders: Columns,
    momentum_borders: Columns,
    start: Columns,
    errors: Tensor,
    back: _Back,
    dends: tuple[Columns, Columns],
    danchor: Columns,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Gradients of keys and values, and of memory, momentum and start; fills in those of the coefficients."""
    s, heads = shape.sequences, k.shape[1]
    options = shape.options(walk_backward_kernel, k)
    slices = _slices(options)
    dmemory = _asked(dends[0], borders, s.count)
    dmomentum = _asked(dends[1], momentum_borders, s.count)
    anchored = any(a is not None for a in danchor)
    if anchored:
        danchor = _asked(danchor, borders, s.count)
    fill = k.new_empty if s.full else k.new_zeros
    inner = torch.float32
    dvalues = k.new_empty(s.chunks, heads, shape.pairs, shape.values)
    dx = k.new_empty(s.chunks, heads, slices, shape.pairs, shape.features)
    dmix = fill(s.chunks, heads, slices, shape.pairs, dtype=inner)
    dtail_mix = torch.empty_like(dmix) if s.full else torch.zeros_like(dmix)
    dscalars = fill(s.chunks, heads, slices, 3, dtype=inner)
    mail, arrived = _mail(options, k, s.count)
    walk_backward_kernel[(s.count * heads * slices,)](
        k, *weights,
        dmemory, dmomentum, start, back.start, borders, momentum_borders, back.borders,
        back.momentum_borders, danchor, errors, back.errors, back.units, back.gates, back.us, back.hidden,
        back.slopes, back.gate_slopes, dvalues, dx, dmix, dtail_mix, dscalars, mail, arrived,
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, ANCHOR=anchored, **options,
    )  # fmt: skip
    back.mix[:, :, -1] += dmix.sum(2)
    scalars = dscalars.sum(2)
    back.keep[:, :, -1] += scalars[..., 0]
    if back.push is not None:
        back.push[:, :, -1] += scalars[..., 1]
        back.tail_mix, back.tail_keep = dtail_mix.sum(2), scalars[..., 2]
    skipped = dvalues if shape.skip and shape.feedback else None
    dk = _gather(shape, k, dx, back.x, skipped, 1.0)
    dv = _gather(shape, k.new_empty(*k.shape[:2], shape.values), dvalues.unsqueeze(2), None, None, -1.0)
    dstart = [None if d is None else d.sum(0, dtype=inner) for d in back.start]
    return dk, dv, [*dmemory, *dmomentum, *dstart]


def _gather(
    shape: Shape, like: Tensor, parts: Tensor, more: Tensor | None, others: Tensor | None, sign: float
) -> Tensor:
    """Gradients by chunk -> of the flat pairs [rows, H, width]"""
    s, width = shape.sequences, like.shape[-1]
    covered = s.full and like.shape[0] == shape.rows
    out = torch.empty_like(like) if covered else torch.zeros_like(like)
    gather_kernel[(s.chunks, like.shape[1])](
        out, parts, more, others, s.pair_start, s.first_chunk, s.sequence, s.length, s.past,
        H=like.shape[1], WIDTH=width, BLOCK=_padded(width), PARTS=parts.shape[2], PAIRS=shape.pairs,
        CHUNK=s.chunk, SIGN=sign,
    )  # fmt: skip
    return out


def _per_chunk(kernel: Any, shape: Shape, q: Tensor, tensors: tuple[Any, ...], lead: int = 0) -> None:
    s = shape.sequences
    kernel[(s.chunks, q.shape[1])](
        *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence, LEAD=lead,
        **shape.options(kernel, q),
    )  # fmt: skip


def _mail(options: dict[str, Any], like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the slices of a head post their parts, and count them."""
    groups, slices = count * options["H"], _slices(options)
    size = 0 if slices == 1 else groups * 2 * slices * options["N"] * options["BV"]
    mail = like.new_empty(size, dtype=torch.float32)
    return mail, like.new_zeros(groups, dtype=torch.int32)


def _slices(options: dict[str, Any]) -> int:
    return -(-options["D"] // options["BD"])


def _borders(s: Sequences, like: Tensor, given: Columns) -> Columns:
    """[NC, H, ...] in the dtype of the inputs, those of each sequence's first chunk filled in."""
    made = tuple(None if w is None else like.new_empty(s.chunks, *w.shape[1:]) for w in given)
    for border, w in zip(made, given, strict=True):
        if border is not None and w is not None:
            border[s.first_chunk[:-1].long()] = w.to(like.dtype)
    return made


def _asked(grads: Columns, like: Columns, count: int) -> Columns:
    """Gradients of states [N, H, ...] fp32, in memory of their own, zero where none is given."""
    return tuple(
        None
        if x is None
        else x.new_zeros(count, *x.shape[1:], dtype=torch.float32)
        if g is None
        else g.clone(memory_format=torch.contiguous_format)
        for g, x in zip(grads, like, strict=True)
    )


def _like(given: Columns) -> Columns:
    return tuple(None if w is None else torch.empty_like(w) for w in given)


def _narrow(given: Columns, like: Tensor) -> Columns:
    return tuple(None if w is None else w.to(like.dtype).contiguous() for w in given)


def _columns(weights: Weights | None) -> Columns:
    return NONE if weights is None else tuple(None if w is None else w.contiguous() for w in weights)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
