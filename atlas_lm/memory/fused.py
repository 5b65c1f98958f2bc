"""From a spec to the fused op that runs it, or the reason why none does.

Matrix memories with a chunk anchor, or with slopes that read no memory, go to `linear_memory`, those that are
read online to `delta_rule`; memories of two layers, gated or not, go to `mlp_memory`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.layout import lay_out
from atlas_lm.memory.objectives import Dot, Huber
from atlas_lm.memory.operands import Operands, of_fresh, of_grid, skips, width
from atlas_lm.memory.optimizers import Momentum, Muon
from atlas_lm.memory.parallel import LINEAR_TILE, head_chunk, slopes_are_free
from atlas_lm.memory.retention import Renormalise
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.tokens import Tokens
from atlas_lm.ops import linear_memory, mlp_memory
from atlas_lm.ops.backend import why_not_triton
from atlas_lm.ops.delta_rule import LONGEST, delta_rule

Fast = dict[str, Tensor]  # fast weights by name
WEIGHT = "w0"  # the one fast weight of a matrix memory


def declines(spec: MemorySpec, *inputs: Tensor, trace: bool) -> str | None:
    """Why no fused op runs this spec on these inputs; None where one does."""
    if trace:
        return "kernels keep no trace; norms of every token come from the parallel form"
    return _unknown(spec, inputs[0].element_size()) or why_not_triton(*inputs)


def unproven(spec: MemorySpec) -> str | None:
    """Why an op that runs this spec should not do so unasked."""
    return None if isinstance(spec.architecture, Matrix) else mlp_memory.UNPROVEN


def _unknown(spec: MemorySpec, element: int) -> str | None:
    """Why no op knows this rule in these sizes; None where one does. element: bytes of a number"""
    rule = spec.optimizer
    if spec.keeps_pairs:
        return "kept pairs have no weights that a kernel could hold"
    if isinstance(spec.objective, Huber):
        return "the Huber objective has no kernel"
    if isinstance(spec.retention, Renormalise):
        return "a memory whose rows are renormalised has no kernel for many tokens"
    if isinstance(rule, Momentum) and rule.truncate:
        return "momentum with cut gradients has no kernel"
    if isinstance(rule, Muon) and rule.carry_per == "period":
        return "momentum that is carried on once per period has no kernel"
    if isinstance(spec.architecture, Matrix):
        return _unknown_matrix(spec)
    return _unknown_deep(spec, element)


def _unknown_matrix(spec: MemorySpec) -> str | None:
    size = spec.window.size
    if spec.network.norm:
        return "a matrix memory with an output norm has no kernel for many tokens"
    if isinstance(spec.optimizer, Muon):
        return "Newton-Schulz steps of a matrix memory have no kernel for many tokens"
    if _exact(spec) and isinstance(spec.optimizer, Momentum):
        return "the online rule with momentum has no kernel"
    if _exact(spec) and size > LONGEST:
        return f"the online rule has kernels for windows up to {LONGEST}, and the window is {size}"
    return linear_memory.why_not_sizes(_chunk(spec), size, spec.feature_dim, spec.value_dim)


def _unknown_deep(spec: MemorySpec, element: int) -> str | None:
    if spec.network.depth != 2:
        return (
            "kernels for many tokens hold a matrix or an MLP of two layers, and this MLP has "
            f"{spec.network.depth}"
        )
    if spec.online:
        return "the online rule (chunk 1) of a deep memory has no kernel for many tokens"
    hidden = spec.fast_shapes["w0"][0]
    momentum = isinstance(spec.optimizer, Momentum) and not isinstance(spec.optimizer, Muon)
    return mlp_memory.why_not_sizes(
        spec.timing.chunk, spec.window.size, width(spec), hidden, spec.value_dim,
        gated="gate" in spec.fast_shapes, states=1 + momentum + spec.retention.reads_start, element=element,
    )  # fmt: skip


def run(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    tokens: Tokens,
    fresh: bool = False,
) -> tuple[Tensor, MemoryState]:
    """Like `parallel.run`, without norms: y [B, H, T, V] and the next state. q, k, v keep their dtype."""
    if fresh and tokens.valid is None:
        y, after = _apply(spec, weights, state, of_fresh(spec, weights, tokens))
        window = _last_pairs(spec, tokens)
        return y, replace(after, window=window, position=state.position + tokens.count)
    grid = lay_out(spec, state, tokens, _chunk(spec), fresh)
    first, outputs, now = 0, [], state
    if not spec.online and (grid.chunks[0].offset or not grid.level):
        y, now = head_chunk(spec, weights, state, grid)
        first, outputs = grid.chunks[0].stop, [y]
    if first < grid.q.shape[2]:
        y, now = _apply(spec, weights, now, of_grid(spec, weights, state, grid, first))
        outputs.append(y)
    now = replace(now, window=_inner(grid.window, state), position=state.position + grid.count)
    return grid.collect(torch.cat(outputs, dim=2), tokens.valid), now


def run_packed(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    tokens: Tokens,
    cu_seqlens: Tensor,
) -> tuple[Tensor, MemoryState]:
    """Fresh sequences packed into one row: y [1, H, T, V], and the state with a row per sequence."""
    borders = cu_seqlens.to(tokens.q.device, torch.int64)
    y, after = _apply(spec, weights, state, of_fresh(spec, weights, tokens, borders))
    halo = spec.window.size - 1
    place = borders[1:, None] + torch.arange(-halo, 0, device=borders.device)  # [N, c-1]
    there = place >= borders[:-1, None]
    fields = tokens.pair_fields(spec.pair_gates)
    window = {n: x[0, :, place.clamp_min(0)].movedim(0, 1) for n, x in fields.items()}
    window = {n: torch.where(_as(there, x), x, 0.0) for n, x in window.items()}
    return y, replace(after, window=_inner(window, state), position=borders.diff())


class End(NamedTuple):
    """What an op leaves behind."""

    memory: Fast
    anchor: Fast  # empty for online rules
    momentum: Fast  # empty for descent


def _apply(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, given: Operands
) -> tuple[Tensor, MemoryState]:
    """Run the op: y [B, H, T, V], and memory, anchor and momentum after it."""
    start = {}
    if spec.retention.reads_start:
        start = {n: weights[f"memory.{n}"] for n in spec.fast_shapes}
    if not isinstance(spec.architecture, Matrix):
        y, end = _two_layers(spec, start, state, given, _norm(weights))
    elif start:
        y, end = _matrix_from(spec, start[WEIGHT], state, given)
    else:
        y, end = _matrix(spec, state.memory[WEIGHT], state, given)
    anchor = end.anchor
    if given.length is not None:  # rows without tokens cross no border
        moved = (given.length > 0)[:, None, None, None]
        anchor = {n: torch.where(moved, w, state.anchor[n]) for n, w in anchor.items()}
    after = replace(state, memory=end.memory, anchor=anchor, momentum=end.momentum)
    return y.transpose(1, 2), after


def _matrix(
    spec: MemorySpec, memory: Tensor, state: MemoryState, given: Operands
) -> tuple[Tensor, End]:
    rows, options = (given.q, given.k, given.v, given.eta), _options(given)
    if _exact(spec):
        after = spec.timing.after_retention
        y, memory = delta_rule(*rows, memory=memory, after_retention=after, **options)
        return y, End({WEIGHT: memory}, {}, {})
    momentum = state.momentum.get(WEIGHT)
    options |= _anchored(spec, given)
    y, end = linear_memory.linear_memory(*rows, memory=memory, momentum=momentum, **options)
    anchor = {} if spec.online else {WEIGHT: end.anchor}
    moved = {} if end.momentum is None else {WEIGHT: end.momentum}
    return y, End({WEIGHT: end.memory}, anchor, moved)


def _matrix_from(
    spec: MemorySpec, start: Tensor, state: MemoryState, given: Operands
) -> tuple[Tensor, End]:
    """A matrix that decays to its start is, minus its start, one that decays to zero."""
    if not isinstance(spec.objective, Dot):
        v = given.v.to(start) - _read(start, given.k)
        given = replace(given, v=v.to(given.v.dtype))
    y, end = _matrix(spec, state.memory[WEIGHT] - start, state, given)
    memory, anchor = ({n: w + start for n, w in group.items()} for group in end[:2])
    return (y.to(start) + _read(start, given.q)).to(y.dtype), End(memory, anchor, end.momentum)


def _two_layers(
    spec: MemorySpec,
    start: Fast,
    state: MemoryState,
    given: Operands,
    norm: mlp_memory.Norm | None,
) -> tuple[Tensor, End]:
    more = given.q.shape[-1] - spec.feature_dim
    y, end = mlp_memory.mlp_memory(
        given.q, given.k, given.v, given.eta,
        memory=_weights(state.memory, more),
        momentum=_weights(state.momentum, more) if state.momentum else None,
        start=_weights(start, more) if start else None,
        activation=spec.network.activation, skip=skips(spec), norm=norm, muon=_muon(spec),
        **_anchored(spec, given), **_options(given),
    )  # fmt: skip
    return y, End(*(_by_name(weights, more) for weights in end))


def _weights(fast: Fast, more: int) -> mlp_memory.Weights:
    """As the op takes them; w0 and gate read features, and get as many columns more as these have."""
    return mlp_memory.Weights(**{n: _wider(w, 0 if n == "w1" else more) for n, w in fast.items()})


def _by_name(weights: mlp_memory.Weights | None, more: int) -> Fast:
    """The inverse of `_weights`."""
    given = {} if weights is None else weights._asdict()
    return {n: _wider(w, 0 if n == "w1" else -more) for n, w in given.items() if w is not None}


def _wider(x: Tensor, more: int) -> Tensor:
    """With so many columns more, of zeros; fewer, where negative."""
    return pad(x, (0, more)) if more else x


def _norm(weights: Mapping[str, Tensor]) -> mlp_memory.Norm | None:
    scale, bias = (weights.get(f"architecture.norm_{n}") for n in ("weight", "bias"))
    return None if scale is None or bias is None else mlp_memory.Norm(scale, bias)


def _muon(spec: MemorySpec) -> mlp_memory.Muon | None:
    rule = spec.optimizer
    if not isinstance(rule, Muon):
        return None
    return mlp_memory.Muon(
        period=spec.timing.period, steps=rule.steps, schedule=rule.schedule, eps=rule.eps
    )


def _options(given: Operands) -> dict[str, Any]:
    """What every op is told."""
    return given.gates | {"past": given.past, "cu_seqlens": given.cu_seqlens, "form": "fused"}


def _anchored(spec: MemorySpec, given: Operands) -> dict[str, Any]:
    """What those with a chunk are told besides."""
    return {"chunk": _chunk(spec), "length": given.length, "objective": spec.objective.kind}


def _last_pairs(spec: MemorySpec, tokens: Tokens) -> Fast:
    """The last c - 1 pairs of a fresh stretch, [B, H, c-1, ...], zero where there are fewer."""
    halo, fields = spec.window.size - 1, tokens.pair_fields(spec.pair_gates)
    missing = max(0, halo - tokens.count)
    kept = {n: x[:, :, tokens.count - min(halo, tokens.count) :] for n, x in fields.items()}
    return {
        n: pad(x, (*[0, 0] * (x.dim() - 3), missing, 0)).to(torch.float32) for n, x in kept.items()
    }


def _inner(window: Mapping[str, Tensor], state: MemoryState) -> dict[str, Tensor]:
    return {n: x.to(state.window[n].dtype) for n, x in window.items()}


def _read(start: Tensor, x: Tensor) -> Tensor:
    """start: [H, V, F], x: [B, T, H, F] -> [B, T, H, V]"""
    return torch.einsum("hvf,bthf->bthv", start, x.to(start))


def _as(there: Tensor, x: Tensor) -> Tensor:
    """[N, n] beside x [N, H, n, ...]"""
    return there.reshape(there.shape[0], 1, -1, *[1] * (x.dim() - 3))


def _exact(spec: MemorySpec) -> bool:
    """The online rule whose slopes read the memory of the token before."""
    return spec.online and not slopes_are_free(spec)


def _chunk(spec: MemorySpec) -> int:
    return LINEAR_TILE if spec.online else spec.timing.chunk
