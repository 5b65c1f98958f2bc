"""The fused form of Muon: a loop over strides, two launches and a Newton-Schulz for each weight; all reads
at once.

Sequences take part in the order of their lengths, so that those that still run stand together in every
stride, and what is kept of a stride, the S and O of its jumps, lies as Newton-Schulz reads it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.chunk_rows import gather_rows
from atlas_lm.ops.chunk_weights import chunk_weights
from atlas_lm.ops.mlp_memory.faded import faded_backward_kernel, faded_forward_kernel
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
from atlas_lm.ops.mlp_memory.record import MLPState, Muon, Problem
from atlas_lm.ops.mlp_memory.room import padded
from atlas_lm.ops.mlp_memory.strides import stride_forward_kernel
from atlas_lm.ops.mlp_memory.strides_back import pairs_backward_kernel, stride_backward_kernel
from atlas_lm.ops.newton_schulz import newton_schulz, newton_schulz_backward


def mlp_memory_muon(problem: Problem, muon: Muon) -> tuple[Tensor, MLPState]:
    """`mlp_memory` with Muon by Triton kernels."""
    p = problem
    shape = Shape.of(p)
    plan = _plan(shape, muon, p.q.device)
    q, k, v = p.q.contiguous(), p.k.contiguous(), p.v.contiguous()
    with torch.cuda.device_of(q):  # kernels run on the current device
        coefficients, fade = _coefficients(p, plan)
        start = columns_of(p.start)
        found = _Strides.apply(
            plan, k, v, *coefficients, *(p.norm or (None, None)), *columns_of(p.memory),
            *columns_of(p.momentum), *start,
        )  # fmt: skip
        places, end, anchor, momentum = _in_sets(found, shape.weights)
        y = _FadedReads.apply(plan, q, fade, *places, *start)
    return through_norm(p, y), state_of(p, end, anchor, momentum)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which sequences take part in which stride."""

    shape: Shape
    muon: Muon
    jumps: int  # of the memory in a chunk
    order: Tensor  # [N], sequences from the longest to the shortest
    running: tuple[int, ...]  # sequences that have a chunk k
    slots: Tensor  # [NC], where each chunk stands among those of all strides
    owner: Tensor  # [places], the sequence of each

    @property
    def places(self) -> int:
        return self.owner.shape[0]

    def sizes(self, like: Tensor) -> dict[str, int]:
        """What the kernels of reads are told of tiles."""
        options = self.shape.options(faded_forward_kernel, like)
        told = {n: x for n, x in options.items() if n not in ("EDGE", "BE", "WINDOW")}
        return told | dict(BT=padded(self.shape.sequences.chunk // self.jumps), JUMPS=self.jumps)

    def by_place(self, like: Tensor, given: Columns) -> Columns:
        return tuple(like.new_empty(self.places, *w.shape[-3:]) for w in given)

    def by_slot(self, like: Tensor, given: Columns) -> Columns:
        """S or O of all jumps of all chunks, [slots, H, JUMPS, ...], in the inputs' dtype"""
        heads, chunks = like.shape[1], self.shape.sequences.chunks
        return tuple(like.new_empty(chunks, heads, self.jumps, *w.shape[-2:]) for w in given)

    def stride(self, k: int, given: Columns) -> Columns:
        """Those of chunk k."""
        first = sum(self.running[:k])
        return tuple(w[first : first + self.running[k]] for w in given)

    def launches(self, k: int) -> Iterator[tuple[int, int, bool]]:
        """Of the stride to chunk k: the first rank, how many, and whether those sequences have a chunk k."""
        on = self.running[k] if k < len(self.running) else 0
        began = self.running[k - 1] if k else self.shape.sequences.count
        if on:
            yield 0, on, True
        if began > on:
            yield on, began - on, False


def _plan(shape: Shape, muon: Muon, device: torch.device) -> _Plan:
    s, jumps = shape.sequences, shape.sequences.chunk // muon.period
    order = sorted(range(s.count), key=lambda n: -s.counts[n])
    running = tuple(sum(count > k for count in s.counts) for k in range(s.most))
    rank = torch.empty(s.count, dtype=torch.int64)
    rank[order] = torch.arange(s.count)
    number = torch.arange(s.chunks, device=device)
    begun = torch.tensor((0, *running), device=device).cumsum(0)
    of = s.sequence.long()
    slots = begun[number - s.first_chunk[of]] + rank.to(device)[of]
    places = torch.tensor([count * jumps + 1 for count in s.counts], device=device)
    owner = torch.arange(s.count, device=device).repeat_interleave(
        places, output_size=s.chunks * jumps + s.count
    )
    return _Plan(shape, muon, jumps, torch.tensor(order, device=device), running, slots, owner)


def _coefficients(p: Problem, plan: _Plan) -> tuple[tuple[Tensor, ...], Tensor]:
    """u [NC, H, JUMPS, PAIRS], keep, fade and step [NC, H, JUMPS] of all jumps; fades of reads [NC, H, b]."""
    s, period, edge = p.sequences, plan.muon.period, plan.shape.edge
    moved = chunk_weights(torch.ones_like(p.eta), None, None, p.gamma, s, halo=edge, retain=p.theta)
    number = torch.arange(s.chunks, device=p.q.device)
    of = s.sequence.long()
    t = torch.arange(s.chunk, device=p.q.device)
    tokens = ((number - s.first_chunk[of]) * s.chunk).unsqueeze(1) + t  # [NC, b]
    valid = tokens < s.length[of, None]

    def by_chunk(gate: Tensor) -> Tensor:
        return gather_rows(gate.unsqueeze(-1), s.start[of], tokens, valid).squeeze(-1)

    last = t[period - 1 :: period]
    seen = torch.arange(s.chunk + edge, device=p.q.device) <= last.unsqueeze(1) + edge
    begun = valid[:, :1, None]  # of chunks without tokens nothing is written
    pushes = torch.where(seen & begun.unsqueeze(-1), -moved.mix[:, :, last], 0.0).contiguous()
    keeps = torch.where(begun, moved.keep[:, :, last], 1.0).contiguous()
    steps = by_chunk(p.eta)[:, :, last].contiguous()
    if p.log_alpha is None:
        unfaded = p.eta.new_ones(*keeps.shape[:2], s.chunk)
        return (pushes, keeps, torch.ones_like(steps), steps), unfaded
    fade = by_chunk(p.log_alpha).unflatten(-1, (plan.jumps, period)).cumsum(-1).exp()
    reads = torch.cat([fade[..., :-1], torch.ones_like(fade[..., :1])], dim=-1).flatten(-2)
    return (pushes, keeps, fade[..., -1].contiguous(), steps), reads.contiguous()


class _Strides(torch.autograd.Function):
    """Memories after all jumps; memory, anchor and momentum at the end."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, k: Tensor, v: Tensor, *rest: Any) -> Any:
        shape, s = plan.shape, plan.shape.sequences
        coefficients = rest[:4]
        norm, cores = rest[4:6] if shape.normed else (), shape.cores(k)
        memory, momentum, start = shape.split(rest[6:], start=True)
        first_momentum = tuple(w[plan.order] for w in narrow(momentum, k))
        memory, momentum = copies(memory), copies(momentum)
        anchor, errors = copies(memory), shape.by_chunk(k, shape.values)
        places = plan.by_place(k, memory)
        pushed, jumps = plan.by_slot(k, memory), list[Columns]()
        options = shape.options(stride_forward_kernel, k)
        box, arrived, turns = mail(options, k, s.count, turns=2 * s.most + 2)
        for step in range(s.most + 1):
            before = jumps[-1] if step else ()
            for rank, count, on in plan.launches(step):
                stride_forward_kernel[(count * k.shape[1] * slices(options),)](
                    k, v, *coefficients, norm, memory, momentum, start, before,
                    plan.stride(step, pushed) if on else (), places, anchor, errors, cores, box, arrived,
                    turns[2 * step + (not on)], plan.order, s.pair_start, s.first_chunk, s.last_chunk,
                    s.length, s.past, step, rank, JUMPS=plan.jumps, FEEDBACK=shape.feedback, SKIP=shape.skip,
                    **shape.bends(k), **options,
                )  # fmt: skip
            if step < s.most:
                jumps.append(tuple(_orthogonal(plan.muon, w) for w in plan.stride(step, pushed)))
        ctx.plan = plan
        ctx.save_for_backward(
            k, v, *coefficients, errors, *norm, *cores, *places, *pushed, *first_momentum, *start,
            *itertools.chain(*jumps),
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return *places, *memory, *anchor, *momentum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: _Plan = ctx.plan
        shape, s = plan.shape, plan.shape.sequences
        k, v, pushes, keeps, fades, steps, errors, *saved = ctx.saved_tensors
        norm: Columns = ()
        cores: Columns = ()
        dnorm = norm_parts(shape, k)
        if shape.normed:
            norm, cores, saved = tuple(saved[:2]), (saved[2],), saved[3:]
        n = shape.weights
        places, pushed, first_momentum, *more = _in_sets(saved, n)
        start, jumps = (more[0], more[1:]) if shape.start else ((), more)
        dplaces = tuple(
            torch.zeros_like(w) if g is None else g.contiguous()
            for w, g in zip(places, grads[:n], strict=True)
        )
        dend, dlast, dpush = (grads[i : i + n] for i in (n, 2 * n, 3 * n))
        dmemory, dmomentum = asked(dend, places, s.count), asked(dpush, places, s.count)
        danchor = asked(dlast, places, s.count) if any(g is not None for g in dlast) else ()
        dstart = asked((None,) * len(start), places if start else (), s.count)
        dpushed = plan.by_slot(k, places)
        dunits = tuple(shape.by_chunk(k, shape.hidden) for _ in range(n - 1))
        dvalues = shape.by_chunk(k, shape.values)
        options = shape.options(stride_backward_kernel, k)
        parts = (s.chunks, k.shape[1], plan.jumps)
        dpushes = pushes.new_empty(*parts, slices(options), pushes.shape[-1])
        dkeeps, dfades, dsteps = (pushes.new_empty(*parts, shape.hidden) for _ in range(3))
        box, arrived, turns = mail(options, k, s.count, turns=2 * s.most + 2)
        for step in reversed(range(s.most + 1)):
            before = plan.stride(step - 1, pushed) if step else first_momentum
            sources = plan.jumps if step else 1
            jumped = jumps[step - 1] if step else ()
            djumps = tuple(torch.empty_like(w) for w in jumped)
            for rank, count, on in plan.launches(step):
                stride_backward_kernel[(count * k.shape[1] * slices(options),)](
                    k, v, pushes, keeps, fades, steps, norm, cores, dnorm, dmemory, dmomentum, start, dstart,
                    jumped, djumps, before, plan.stride(step, dpushed) if on else (), places, dplaces,
                    danchor, errors, dunits, dvalues, dpushes, dkeeps, dfades, dsteps, box, arrived,
                    turns[2 * step + (not on)], plan.order, s.pair_start, s.first_chunk, s.last_chunk,
                    s.length, s.past, step, rank, JUMPS=plan.jumps, BEFORE=sources, FEEDBACK=shape.feedback,
                    **shape.bends(k), **options,
                )  # fmt: skip
            if step:
                asked_of = plan.stride(step - 1, dpushed)
                for s_j, do_j, ds_j in zip(before, djumps, asked_of, strict=True):
                    ds_j.copy_(_orthogonal_back(plan.muon, s_j, do_j))
        dx = shape.by_chunk(k, shape.features)
        per_chunk(
            pairs_backward_kernel, shape, k,
            (k, pushes, places, errors, dunits, dpushed, plan.slots, dx), JUMPS=plan.jumps, **shape.bends(k),
        )  # fmt: skip
        skipped = (dvalues,) if shape.adds_keys else ()
        dk, dv = pair_gradient(shape, k, shape.features), pair_gradient(shape, k, shape.values)
        gather_pairs(shape, dk, dx, skipped, 1.0)
        gather_pairs(shape, dv, dvalues, (), -1.0)
        scalars = (dpushes.sum(-2), dkeeps.sum(-1), dfades.sum(-1), dsteps.sum(-1))
        asked_norm = dnorm[0].sum(0).unbind(1) if dnorm else (None, None)
        starts = (d.sum(0) for d in dstart)
        return None, dk, dv, *scalars, *asked_norm, *dmemory, *dmomentum, *starts


class _FadedReads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, fade: Tensor, *rest: Any) -> Tensor:
        shape, s = plan.shape, plan.shape.sequences
        places, start = rest[: shape.weights], narrow(rest[shape.weights :], q)
        fill = torch.empty if s.full else torch.zeros
        y = fill(*q.shape[:2], shape.values, dtype=q.dtype, device=q.device)
        faded_forward_kernel[(plan.places * q.shape[1],)](
            q, fade, places, start, y, plan.owner, s.first_chunk, s.start, s.length, SKIP=shape.skip,
            **shape.bends(q), **plan.sizes(q),
        )  # fmt: skip
        ctx.plan = plan
        ctx.save_for_backward(q, fade, *rest)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: _Plan = ctx.plan
        shape, s = plan.shape, plan.shape.sequences
        q, fade, *rest = ctx.saved_tensors
        places, start = tuple(rest[: shape.weights]), rest[shape.weights :]
        dplaces, dstart = empty_like(places), empty_like(places) if start else ()
        dq = (torch.empty_like if s.full else torch.zeros_like)(q)
        dfade = torch.zeros_like(fade)
        faded_backward_kernel[(plan.places * q.shape[1],)](
            q, fade, places, narrow(tuple(start), q), dy.contiguous(), dplaces, dstart, dq, dfade, plan.owner,
            s.first_chunk, s.start, s.length, SKIP=shape.skip, **shape.bends(q), **plan.sizes(q),
        )  # fmt: skip
        return None, dq, dfade, *dplaces, *(d.sum(0, dtype=torch.float32) for d in dstart)


def _in_sets(tensors: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    return [tuple(tensors[i : i + size]) for i in range(0, len(tensors), size)]


def _orthogonal(muon: Muon, s: Tensor) -> Tensor:
    return newton_schulz(s, muon.steps, name=muon.schedule, eps=muon.eps)


def _orthogonal_back(muon: Muon, s: Tensor, grad: Tensor) -> Tensor:
    return newton_schulz_backward(s, grad, muon.steps, name=muon.schedule, eps=muon.eps)
