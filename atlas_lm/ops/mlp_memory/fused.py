"""The fused form: errors and borders by a walk, then all reads at once; backwards the other way round.

Kernels hold hidden units as rows, so the last layer is transposed here, on its way in and out."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.backend import HALVES, interpreted
from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights
from atlas_lm.ops.mlp_memory.gather import gather_kernel
from atlas_lm.ops.mlp_memory.reads import reads_forward_kernel
from atlas_lm.ops.mlp_memory.record import MLPState, Problem, Weights
from atlas_lm.ops.mlp_memory.tokens_back import tokens_backward_kernel
from atlas_lm.ops.mlp_memory.units_back import GATED, UNITS, units_backward_kernel
from atlas_lm.ops.mlp_memory.walk import walk_forward_kernel
from atlas_lm.ops.mlp_memory.walk_back import walk_backward_kernel
from atlas_lm.ops.sequences import Sequences
from atlas_lm.ops.tiles import pick

Columns = tuple[
    Tensor, ...
]  # w0 [..., D, F], w1 transposed [..., D, V] and the gate [..., D, F], or none at all


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
    "tokens_backward_kernel fp32": Block(32, 32, 8),
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
    end, anchor, momentum = (_weights(columns) for columns in shape.split(state))
    assert end is not None and anchor is not None
    if not s.full:  # a row without tokens passes no border
        idle = (s.length == 0)[:, None, None, None]
        anchor = anchor.map(lambda a, m: torch.where(idle, m, a), p.memory)
    return y, MLPState(end, anchor, momentum)


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
    activation: str

    @classmethod
    def of(cls, p: Problem) -> "Shape":
        features, hidden, values = p.sizes
        return cls(
            p.sequences, p.q.shape[0], features, hidden, values, p.window, len(p.memory.given),
            p.momentum is not None, p.start is not None, p.objective == "l2", p.skip, p.activation,
        )  # fmt: skip

    @property
    def edge(self) -> int:
        """Pairs before a chunk that its tensors hold: those of the window, in sixteens."""
        return -(-(self.window - 1) // 16) * 16

    def by_chunk(self, like: Tensor, rows: int) -> Tensor:
        """[NC, H, rows, PAIRS], empty, with the dtype and heads of queries or keys"""
        pairs = self.sequences.chunk + self.edge
        return like.new_empty(self.sequences.chunks, like.shape[1], rows, pairs)

    def split(self, tensors: Any, start: bool = False) -> tuple[Columns, Columns, Columns]:
        """What stands in a row: memory, momentum and start; or memory, anchor and momentum."""
        n, tensors = self.weights, tuple(tensors)
        second = n if self.momentum or not start else 0
        return tensors[:n], tensors[n : n + second], tensors[n + second :]

    def options(self, kernel: Any, like: Tensor) -> dict[str, Any]:
        """Launch options."""
        half = like.dtype in HALVES
        block = pick(BLOCKS, kernel.__name__, {"fp32": not half})
        hidden = _padded(self.hidden)
        if not (kernel in WALKS and one_by_one(like)):
            hidden = min(block.hidden, hidden)
        return dict(
            H=like.shape[1], F=self.features, D=self.hidden, V=self.values,
            BF=min(block.features, _padded(self.features)), BV=_padded(self.values), BD=hidden,
            CHUNK=self.sequences.chunk, EDGE=self.edge, BE=_padded(self.edge) if self.edge else 0,
            WINDOW=self.window, PRECISION="tf32" if half else "ieee",
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    def bends(self, like: Tensor) -> dict[str, Any]:
        """What kernels are told that compute the activation."""
        return dict(ACTIVATION=self.activation, FAST=like.dtype in HALVES and not interpreted())


class _MLPMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        weights = ChunkWeights(*rest[:5])
        memory, momentum, start = shape.split(rest[5:], start=True)
        walked = _walk(shape, k, v, weights, memory, momentum, start)
        y = (torch.empty if shape.sequences.full else torch.zeros)(
            *q.shape[:2], shape.values, dtype=q.dtype, device=q.device
        )
        before = _Before(
            q, k, weights, walked.errors, shape.by_chunk(q, shape.sequences.chunk),
            walked.borders, walked.momentum_borders, start,
        )  # fmt: skip
        _per_chunk(
            reads_forward_kernel, shape, q,
            (q, k, weights.mix, weights.keep, weights.push, before.borders, before.momentum_borders,
             _narrow(start, q), before.errors, before.score, y),
            SKIP=shape.skip, **shape.bends(q),
        )  # fmt: skip
        ctx.shape = shape
        ctx.save_for_backward(
            q,
            k,
            *weights,
            before.errors,
            before.score,
            *before.borders,
            *before.momentum_borders,
            *start,
        )
        ctx.set_materialize_grads(False)
        return y, *walked.end, *walked.anchor, *walked.end_momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> Any:
        shape: Shape = ctx.shape
        q, k, *saved = ctx.saved_tensors
        before = _Before(
            q, k, ChunkWeights(*saved[:5]), *saved[5:7], *shape.split(saved[7:], start=True)
        )
        dy = q.new_zeros(*q.shape[:2], shape.values) if dy is None else dy.contiguous()
        back = _units_back(shape, before, dy)
        walked = _walk_back(shape, before, back, *shape.split(dstate))
        dq, dk, dv, dweights = _tokens_back(shape, before, back, walked, dy)
        return None, dq, dk, dv, *dweights, *walked.memory, *walked.momentum, *walked.start


@dataclass(frozen=True, eq=False)
class _Walked:
    end: Columns
    end_momentum: Columns
    anchor: Columns
    borders: Columns
    momentum_borders: Columns
    errors: Tensor


@dataclass(frozen=True, eq=False)
class _Before:
    """What the backward pass begins with."""

    q: Tensor
    k: Tensor
    weights: ChunkWeights
    errors: Tensor  # [NC, H, V, PAIRS]
    score: Tensor  # [NC, H, CHUNK, PAIRS]
    borders: Columns
    momentum_borders: Columns
    start: Columns


@dataclass(frozen=True, eq=False)
class _Back:
    """What the reads ask, by chunk; the walk back adds what later chunks do."""

    borders: Columns  # after the walk: asked of the state after each chunk
    momentum_borders: Columns
    start: Columns  # [NC, H, ...]
    errors: Tensor
    units: dict[str, Tensor]  # tiles [NC, H, D, PAIRS] by the names of UNITS and GATED
    asked: Columns  # of the units of queries, [NC, H, D, CHUNK]
    gates: Tensor  # [NC, H, BLOCKS, 2, CHUNK], parts of keep's and push's


@dataclass(frozen=True, eq=False)
class _WalkedBack:
    memory: Columns
    momentum: Columns
    start: Columns
    values: Tensor  # of the errors, [NC, H, V, PAIRS]
    scalars: Tensor  # of the last keep, last push and carry, [NC, H, 3]


def _walk(
    shape: Shape,
    k: Tensor,
    v: Tensor,
    weights: ChunkWeights,
    memory: Columns,
    momentum: Columns,
    start: Columns,
) -> _Walked:
    s, heads = shape.sequences, k.shape[1]
    walked = _Walked(
        end=_copies(memory),
        end_momentum=_copies(momentum),
        anchor=_like(memory),
        borders=_borders(s, k, memory),
        momentum_borders=_borders(s, k, momentum),
        errors=shape.by_chunk(k, shape.values),
    )
    options = shape.options(walk_forward_kernel, k)
    walk_forward_kernel[(s.count * heads * _slices(options),)](
        k, v, *weights, (), walked.end, walked.end_momentum, start, walked.borders, walked.momentum_borders,
        walked.anchor, walked.errors, (), *_mail(options, k, s.count),
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, SKIP=shape.skip,
        **shape.bends(k), **options,
    )  # fmt: skip
    return walked


def _units_back(shape: Shape, before: _Before, dy: Tensor) -> _Back:
    q, weights = before.q, before.weights
    fill = torch.empty_like if shape.sequences.full else torch.zeros_like
    names = UNITS + (GATED if shape.weights > 2 else ())
    options = shape.options(units_backward_kernel, q)
    chunks, chunk = shape.sequences.chunks, shape.sequences.chunk
    gates = (q.new_empty if shape.sequences.full else q.new_zeros)(
        chunks, q.shape[1], _slices(options), 2, chunk, dtype=torch.float32
    )
    back = _Back(
        borders=_like(before.borders),
        momentum_borders=_like(before.momentum_borders),
        start=tuple(fill(b) for b in before.borders) if shape.start else (),
        errors=shape.by_chunk(q, shape.values),
        units={name: shape.by_chunk(q, shape.hidden) for name in names},
        asked=tuple(
            q.new_empty(chunks, q.shape[1], shape.hidden, chunk) for _ in range(shape.weights - 1)
        ),
        gates=gates,
    )
    _per_chunk(
        units_backward_kernel, shape, q,
        (q, before.k, weights.mix, weights.keep, weights.push, before.borders, before.momentum_borders,
         _narrow(before.start, q), before.errors, before.score, dy, back.borders, back.momentum_borders,
         back.start, back.errors, tuple(back.units.values()), back.asked, back.gates),
        programs=_slices(options), **shape.bends(q),
    )  # fmt: skip
    return back


def _walk_back(
    shape: Shape,
    before: _Before,
    back: _Back,
    dend: Columns,
    danchor: Columns,
    dend_momentum: Columns,
) -> _WalkedBack:
    """dend ...: gradients of what the pass left behind, None where there is none."""
    s, k = shape.sequences, before.k
    options = shape.options(walk_backward_kernel, k)
    fill = torch.empty if s.full else torch.zeros
    scalars = fill(s.chunks, k.shape[1], 3, shape.hidden, device=k.device)
    walked = _WalkedBack(
        memory=_asked(dend, before.borders, s.count),
        momentum=_asked(dend_momentum, before.momentum_borders, s.count),
        start=_asked((None,) * len(before.start), before.start and before.borders, s.count),
        values=shape.by_chunk(k, shape.values),
        scalars=scalars,
    )
    anchored = any(a is not None for a in danchor)
    walk_backward_kernel[(s.count * k.shape[1] * _slices(options),)](
        k, *before.weights, walked.memory, walked.momentum, before.start, walked.start, before.borders,
        before.momentum_borders, back.borders, back.momentum_borders,
        _asked(danchor, before.borders, s.count) if anchored else (), before.errors, back.errors,
        tuple(back.units.values()), walked.values, scalars, *_mail(options, k, s.count),
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, **options,
    )  # fmt: skip
    starts = (
        d.sum(0) + r.sum(0, dtype=d.dtype) for d, r in zip(walked.start, back.start, strict=True)
    )
    return replace(walked, start=tuple(starts), scalars=scalars.sum(-1))


def _tokens_back(
    shape: Shape, before: _Before, back: _Back, walked: _WalkedBack, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, ChunkWeights]:
    """Gradients of queries, keys, values and coefficients."""
    q, k, weights = before.q, before.k, before.weights
    fill = torch.empty_like if shape.sequences.full else torch.zeros_like
    dq, dx = fill(q), shape.by_chunk(k, shape.features)
    dmix, dkeep = fill(weights.mix), back.gates[:, :, :, 0].sum(2)
    dpush = dtail_mix = dtail_keep = None
    dkeep[:, :, -1] += walked.scalars[..., 0]
    if weights.push is not None and weights.tail_mix is not None:
        dpush, dtail_mix, dtail_keep = (
            back.gates[:, :, :, 1].sum(2),
            fill(weights.tail_mix),
            walked.scalars[..., 2],
        )
        dpush[:, :, -1] += walked.scalars[..., 1]
    slopes, dunits = (
        tuple(back.units[n] for n in names if n in back.units)
        for names in (("slopes", "gate_slopes"), ("dunits", "dgate"))
    )
    _per_chunk(
        tokens_backward_kernel, shape, q,
        (q, k, weights.mix, weights.keep, weights.push, weights.tail_mix, before.borders,
         before.momentum_borders, _narrow(before.start, q), before.errors, before.score, dy, back.borders,
         back.momentum_borders, back.units["hidden"], slopes, dunits, back.asked, dq, dmix, dtail_mix, dx),
        SKIP=shape.skip,
    )  # fmt: skip
    skipped = (walked.values,) if shape.skip and shape.feedback else ()
    dk = _gather(shape, k, dx, skipped, 1.0)
    dv = _gather(shape, k.new_empty(*k.shape[:2], shape.values), walked.values, (), -1.0)
    return dq, dk, dv, ChunkWeights(dmix, dkeep, dpush, dtail_mix, dtail_keep)


def _gather(shape: Shape, like: Tensor, part: Tensor, more: Columns, sign: float) -> Tensor:
    """Gradients by chunk -> of the flat pairs [rows, H, width]"""
    s, width = shape.sequences, like.shape[-1]
    covered = s.full and like.shape[0] == shape.rows
    out = torch.empty_like(like) if covered else torch.zeros_like(like)
    gather_kernel[(s.chunks * like.shape[1],)](
        out, (part, *more), s.pair_start, s.first_chunk, s.sequence, s.length, s.past, H=like.shape[1],
        WIDTH=width, BLOCK=_padded(width), EDGE=shape.edge, CHUNK=s.chunk, SIGN=sign,
    )  # fmt: skip
    return out


def _per_chunk(
    kernel: Any, shape: Shape, q: Tensor, tensors: tuple[Any, ...], programs: int = 1, **more: Any
) -> None:
    """Launch so many programs for every chunk and head."""
    s = shape.sequences
    kernel[(s.chunks * q.shape[1] * programs,)](
        *tensors, s.start, s.pair_start, s.length, s.past, s.first_chunk, s.sequence,
        **more, **shape.options(kernel, q),
    )  # fmt: skip


def _mail(options: dict[str, Any], like: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the slices of a head post their parts, and count them; whose turn it is to begin."""
    groups, slices = count * options["H"], _slices(options)
    size = 0 if slices == 1 else 2 * slices * options["BV"] * (options["CHUNK"] + options["BE"])
    mail = like.new_empty(groups * size, dtype=torch.float32)
    counts = like.new_zeros(groups + 1, dtype=torch.int32)
    return mail, counts[1:], counts[:1]


def _slices(options: dict[str, Any]) -> int:
    return -(-options["D"] // options["BD"])


def _borders(s: Sequences, like: Tensor, given: Columns) -> Columns:
    """[NC, H, ...] in the dtype of the inputs"""
    return tuple(like.new_empty(s.chunks, *w.shape[1:]) for w in given)


def _asked(grads: tuple[Tensor | None, ...], like: Columns, count: int) -> Columns:
    """Gradients of states [N, H, ...] fp32, in memory of their own, zero where none is given."""
    return tuple(
        x.new_zeros(count, *x.shape[1:], dtype=torch.float32) if g is None else _copy(g)
        for g, x in zip(grads, like, strict=True)
    )


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copies(given: Columns) -> Columns:
    return tuple(_copy(w) for w in given)


def _like(given: Columns) -> Columns:
    return tuple(torch.empty_like(w) for w in given)


def _narrow(given: Columns, like: Tensor) -> Columns:
    return tuple(w.to(like.dtype) for w in given)


def _columns(weights: Weights | None) -> Columns:
    if weights is None:
        return ()
    w0, w1, *gate = weights.given
    return tuple(w.contiguous() for w in (w0, w1.mT, *gate))


def _weights(columns: Columns) -> Weights | None:
    if not columns:
        return None
    w0, w1, *gate = columns
    return Weights(w0, w1.mT, *gate)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
