"""The fused form: errors and borders by a walk, then all reads at once; backwards the other way round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.chunk_weights import ChunkWeights, chunk_weights
from atlas_lm.ops.mlp_memory.launch import (
    Columns,
    Shape,
    asked,
    columns_of,
    copies,
    empty_like,
    gather_pairs,
    mail,
    narrow,
    norm_parts,
    pair_gradient,
    per_chunk,
    slices,
    state_of,
    through_norm,
)
from atlas_lm.ops.mlp_memory.muon import mlp_memory_muon
from atlas_lm.ops.mlp_memory.reads import reads_forward_kernel
from atlas_lm.ops.mlp_memory.record import MLPState, Problem
from atlas_lm.ops.mlp_memory.tokens_back import tokens_backward_kernel
from atlas_lm.ops.mlp_memory.units_back import GATED, UNITS, units_backward_kernel
from atlas_lm.ops.mlp_memory.walk import walk_forward_kernel
from atlas_lm.ops.mlp_memory.walk_back import walk_backward_kernel
from atlas_lm.ops.sequences import Sequences


def mlp_memory_fused(problem: Problem) -> tuple[Tensor, MLPState]:
    """`mlp_memory` by Triton kernels."""
    p, s = problem, problem.sequences
    if p.muon is not None:
        return mlp_memory_muon(p, p.muon)
    shape = Shape.of(p)
    with torch.cuda.device_of(p.q):  # kernels run on the current device
        weights = chunk_weights(p.eta, p.log_alpha, p.theta, p.gamma, s, halo=shape.edge)
        y, *state = _MLPMemory.apply(
            shape, p.q.contiguous(), p.k.contiguous(), p.v.contiguous(), *weights, *(p.norm or (None, None)),
            *columns_of(p.memory), *columns_of(p.momentum), *columns_of(p.start),
        )  # fmt: skip
    return through_norm(p, y), state_of(p, *shape.split(state))


class _MLPMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        weights = ChunkWeights(*rest[:5])
        memory, momentum, start = shape.split(rest[7:], start=True)
        norm = rest[5:7] if shape.normed else ()
        walked = _walk(shape, k, v, weights, norm, memory, momentum, start)
        y = (torch.empty if shape.sequences.full else torch.zeros)(
            *q.shape[:2], shape.values, dtype=q.dtype, device=q.device
        )
        before = _Before(
            q, k, v, weights, norm, walked.cores, walked.errors, shape.by_chunk(q, shape.sequences.chunk),
            walked.borders, walked.momentum_borders, start,
        )  # fmt: skip
        per_chunk(
            reads_forward_kernel, shape, q,
            (q, k, weights.mix, weights.keep, weights.push, before.borders, before.momentum_borders,
             narrow(start, q), before.errors, before.score, y),
            SKIP=shape.skip, **shape.bends(q),
        )  # fmt: skip
        ctx.shape = shape
        ctx.save_for_backward(
            q, k, v, *weights, *norm, *walked.cores, before.errors, before.score, *before.borders,
            *before.momentum_borders, *start,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return y, *walked.end, *walked.anchor, *walked.end_momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> Any:
        shape: Shape = ctx.shape
        q, k, v, *saved = ctx.saved_tensors
        weights, saved = ChunkWeights(*saved[:5]), saved[5:]
        norm: Columns = ()
        cores: Columns = ()
        if shape.normed:
            norm, cores, saved = tuple(saved[:2]), (saved[2],), saved[3:]
        (errors, score), states = saved[:2], shape.split(saved[2:], start=True)
        before = _Before(q, k, v, weights, norm, cores, errors, score, *states)
        dy = q.new_zeros(*q.shape[:2], shape.values) if dy is None else dy.contiguous()
        dq = (torch.empty_like if shape.sequences.full else torch.zeros_like)(q)
        dk, dv = pair_gradient(shape, k, shape.features), pair_gradient(shape, k, shape.values)
        dpairs = _Pairs(dq, dk, dv)
        parts = [
            _backward(
                replace(shape, sequences=s), before.part(chunks), dy, _rows(dstate, mine), dpairs
            )
            for s, mine, chunks in shape.sequences.parts(shape.parts(walk_backward_kernel, k))
        ]
        dweights, dmemory, dmomentum, dstart, dnorm = zip(*parts, strict=True)
        return (
            None, dq, dk, dv, *map(_joined, zip(*dweights, strict=True)),
            *(map(sum, zip(*dnorm, strict=True)) if shape.normed else (None, None)),
            *map(_joined, zip(*dmemory, strict=True)), *map(_joined, zip(*dmomentum, strict=True)),
            *map(sum, zip(*dstart, strict=True)),
        )  # fmt: skip


class _Pairs(NamedTuple):
    """Gradients of flat rows, to be filled."""

    q: Tensor
    k: Tensor
    v: Tensor


def _backward(
    shape: Shape, before: "_Before", dy: Tensor, dstate: Sequence[Tensor | None], found: _Pairs
) -> tuple[ChunkWeights, Columns, Columns, Columns, Columns]:
    """Of some sequences: gradients of coefficients, memory, momentum, start and norm; those of rows are put
    into `found`."""
    back = _units_back(shape, before, dy)
    walked = _walk_back(shape, before, back, *shape.split(dstate))
    dweights = _tokens_back(shape, before, back, walked, dy, found)
    dnorm = walked.norm[0].sum(0).unbind(1) if shape.normed else ()
    return dweights, walked.memory, walked.momentum, walked.start, dnorm


def _rows(grads: Sequence[Tensor | None], mine: slice) -> list[Tensor | None]:
    return [None if g is None else g[mine] for g in grads]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0] if given else None
    return torch.cat(given)


@dataclass(frozen=True, eq=False)
class _Walked:
    end: Columns
    end_momentum: Columns
    anchor: Columns
    borders: Columns
    momentum_borders: Columns
    errors: Tensor
    cores: Columns


@dataclass(frozen=True, eq=False)
class _Before:
    """What the backward pass begins with."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: ChunkWeights
    norm: Columns  # scale and bias, if there is one
    cores: Columns  # with a norm, [NC, H, V, PAIRS]
    errors: Tensor  # [NC, H, V, PAIRS]
    score: Tensor  # [NC, H, CHUNK, PAIRS]
    borders: Columns
    momentum_borders: Columns
    start: Columns

    def part(self, chunks: slice) -> "_Before":
        """Of these chunks alone."""

        def cut(columns: Columns) -> Columns:
            return tuple(w[chunks] for w in columns)

        return replace(
            self,
            weights=ChunkWeights._make(None if w is None else w[chunks] for w in self.weights),
            cores=cut(self.cores),
            errors=self.errors[chunks],
            score=self.score[chunks],
            borders=cut(self.borders),
            momentum_borders=cut(self.momentum_borders),
        )


@dataclass(frozen=True, eq=False)
class _Back:
    """What the reads ask, by chunk; the walk back adds what later chunks do."""

    borders: Columns  # after the walk: asked of the state after each chunk
    momentum_borders: Columns
    start: Columns  # [NC, H, ...]
    errors: Tensor
    units: dict[str, Tensor]  # tiles [NC, H, D, PAIRS] by the names of UNITS and GATED
    asked: Columns  # of the units of queries, [NC, H, D, CHUNK]
    gates: Tensor  # [NC, H, BLOCKS + 1, 2, CHUNK], parts of keep's and push's, the last one of the tokens


@dataclass(frozen=True, eq=False)
class _WalkedBack:
    memory: Columns
    momentum: Columns
    start: Columns
    values: Tensor  # turned round, [NC, H, V, PAIRS]
    norm: Columns  # with one, [NC, H, 2, V]
    scalars: Tensor  # of the last keep, last push and carry, [NC, H, 3]


def _walk(
    shape: Shape,
    k: Tensor,
    v: Tensor,
    weights: ChunkWeights,
    norm: Columns,
    memory: Columns,
    momentum: Columns,
    start: Columns,
) -> _Walked:
    s, heads = shape.sequences, k.shape[1]
    walked = _Walked(
        end=copies(memory),
        end_momentum=copies(momentum),
        anchor=empty_like(memory),
        borders=_borders(s, k, memory),
        momentum_borders=_borders(s, k, momentum),
        errors=shape.by_chunk(k, shape.values),
        cores=shape.cores(k),
    )
    options = shape.options(walk_forward_kernel, k)
    walk_forward_kernel[(s.count * heads * slices(options),)](
        k, v, *weights, norm, walked.end, walked.end_momentum, start, walked.borders, walked.momentum_borders,
        walked.anchor, walked.errors, walked.cores, *mail(options, k, s.count),
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, SKIP=shape.skip,
        HELD=shape.held, **shape.bends(k), **options,
    )  # fmt: skip
    return walked


def _units_back(shape: Shape, before: _Before, dy: Tensor) -> _Back:
    q, weights = before.q, before.weights
    fill = torch.empty_like if shape.sequences.full else torch.zeros_like
    names = UNITS + (GATED if shape.weights > 2 else ())
    options = shape.options(units_backward_kernel, q)
    chunks, chunk = shape.sequences.chunks, shape.sequences.chunk
    gates = (q.new_empty if shape.sequences.full else q.new_zeros)(
        chunks, q.shape[1], slices(options) + 1, 2, chunk, dtype=torch.float32
    )
    back = _Back(
        borders=empty_like(before.borders),
        momentum_borders=empty_like(before.momentum_borders),
        start=tuple(fill(b) for b in before.borders) if shape.start else (),
        errors=shape.by_chunk(q, shape.values),
        units={name: shape.by_chunk(q, shape.hidden) for name in names},
        asked=tuple(
            q.new_empty(chunks, q.shape[1], shape.hidden, chunk) for _ in range(shape.weights - 1)
        ),
        gates=gates,
    )
    per_chunk(
        units_backward_kernel, shape, q,
        (q, before.k, weights.mix, weights.keep, weights.push, before.borders, before.momentum_borders,
         narrow(before.start, q), before.errors, before.score, dy, back.borders, back.momentum_borders,
         back.start, back.errors, tuple(back.units.values()), back.asked, back.gates),
        programs=slices(options), **shape.bends(q),
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
        memory=asked(dend, before.borders, s.count),
        momentum=asked(dend_momentum, before.momentum_borders, s.count),
        start=asked((None,) * len(before.start), before.start and before.borders, s.count),
        values=shape.by_chunk(k, shape.values),
        norm=norm_parts(shape, k),
        scalars=scalars,
    )
    anchored = any(a is not None for a in danchor)
    walk_backward_kernel[(s.count * k.shape[1] * slices(options),)](
        k, before.v, *before.weights, before.norm, before.cores, walked.norm, walked.memory, walked.momentum,
        before.start, walked.start, before.borders, before.momentum_borders, back.borders,
        back.momentum_borders, asked(danchor, before.borders, s.count) if anchored else (), before.errors,
        back.errors, tuple(back.units.values()), walked.values, scalars, *mail(options, k, s.count),
        s.pair_start, s.first_chunk, s.length, s.past, FEEDBACK=shape.feedback, FAST=shape.fast(k),
        HELD=shape.held, **options,
    )  # fmt: skip
    starts = (
        d.sum(0) + r.sum(0, dtype=d.dtype) for d, r in zip(walked.start, back.start, strict=True)
    )
    return replace(walked, start=tuple(starts), scalars=scalars.sum(-1))


def _tokens_back(
    shape: Shape, before: _Before, back: _Back, walked: _WalkedBack, dy: Tensor, found: _Pairs
) -> ChunkWeights:
    """Gradients of coefficients, and of queries, keys and values where they are found."""
    q, k, weights = before.q, before.k, before.weights
    fill = torch.empty_like if shape.sequences.full else torch.zeros_like
    dx = shape.by_chunk(k, shape.features)
    dmix = fill(weights.mix)
    dtail_mix = None if weights.tail_mix is None else fill(weights.tail_mix)
    slopes, dunits = (
        tuple(back.units[n] for n in names if n in back.units)
        for names in (("slopes", "gate_slopes"), ("dunits", "dgate"))
    )
    per_chunk(
        tokens_backward_kernel, shape, q,
        (q, k, weights.mix, weights.keep, weights.push, weights.tail_mix, before.borders,
         before.momentum_borders, narrow(before.start, q), before.errors, before.score, dy, back.borders,
         back.momentum_borders, back.units["hidden"], slopes, dunits, back.asked, found.q, dmix, dtail_mix,
         dx, back.gates),
        PARTS=back.gates.shape[2], SKIP=shape.skip,
    )  # fmt: skip
    skipped = (walked.values,) if shape.adds_keys else ()
    gather_pairs(shape, found.k, dx, skipped, 1.0)
    gather_pairs(shape, found.v, walked.values, (), -1.0)
    gates, scalars = back.gates.sum(2), walked.scalars
    gates[:, :, :, -1] += scalars[..., :2]
    if dtail_mix is None:
        return ChunkWeights(dmix, gates[:, :, 0], None, None, None)
    return ChunkWeights(dmix, gates[:, :, 0], gates[:, :, 1], dtail_mix, scalars[..., 2])


def _borders(s: Sequences, like: Tensor, given: Columns) -> Columns:
    """[NC, H, ...] in the dtype of the inputs"""
    return tuple(like.new_empty(s.chunks, *w.shape[1:]) for w in given)
