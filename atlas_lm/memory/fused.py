"""From a spec to the fused op that runs it, or the reason why none does.

Matrix memories with a chunk anchor, or with slopes that read no memory, go to `linear_memory`, those that are
read online to `delta_rule`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.layout import Grid, lay_out
from atlas_lm.memory.objectives import Dot, Huber
from atlas_lm.memory.optimizers import Momentum, Muon
from atlas_lm.memory.parallel import LINEAR_TILE, head_chunk, slopes_are_free
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.tokens import Tokens
from atlas_lm.ops.backend import why_not_triton
from atlas_lm.ops.delta_rule import LONGEST, delta_rule
from atlas_lm.ops.linear_memory import linear_memory, why_not_sizes

WEIGHT = "w0"  # the one fast weight of a matrix memory


def declines(spec: MemorySpec, *inputs: Tensor, trace: bool) -> str | None:
    """Why no fused op runs this spec on these inputs; None where one does."""
    if not isinstance(spec.architecture, Matrix) or spec.architecture.norm:
        return "only matrix memories without an output norm have kernels for many tokens"
    if isinstance(spec.optimizer, Muon):
        return "Newton-Schulz steps have no kernel for many tokens"
    if isinstance(spec.objective, Huber):
        return "the Huber objective has no kernel"
    if isinstance(spec.optimizer, Momentum) and (spec.optimizer.truncate or _exact(spec)):
        return "momentum with cut gradients, and the online rule with momentum, have no kernel"
    if trace:
        return "kernels keep no trace; norms of every token come from the parallel form"
    if _exact(spec) and spec.window.size > LONGEST:
        size = spec.window.size
        return f"the online rule has kernels for windows up to {LONGEST}, and the window is {size}"
    sizes = why_not_sizes(_chunk(spec), spec.window.size, spec.feature_dim, spec.value_dim)
    return sizes or why_not_triton(*inputs)


@dataclass(frozen=True)
class Stretch:
    """Tokens on a chunk border with the pairs before them, as an op takes them: [B, T, H, ...]."""

    q: Tensor  # features, in the inputs' dtype
    k: Tensor  # [B, P + T, H, F]
    v: Tensor  # [B, P + T, H, V]
    eta: Tensor  # [B, T, H]
    gates: dict[
        str, Tensor
    ]  # log_alpha, theta [B, T, H] and gamma [B, T, H, c], those that the rule has
    past: Tensor | None  # [B], pairs that exist of the P
    length: Tensor | None  # [B], tokens of each row


def run(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    tokens: Tokens,
    fresh: bool = False,
) -> tuple[Tensor, MemoryState]:
    """Like `parallel.run`, without norms: y [B, H, T, V] and the next state. q, k, v keep their dtype."""
    if fresh and tokens.valid is None:
        stretch = _stretch(
            spec, weights, tokens.q, tokens.pair_fields(spec.pair_gates), tokens.gates
        )
        y, after = _apply(spec, weights, state, stretch, None)
        window = _last_pairs(spec, tokens)
        return y, replace(after, window=window, position=state.position + tokens.count)
    grid = lay_out(spec, state, tokens, _chunk(spec), fresh)
    first, outputs, now = 0, [], state
    if not spec.online and (grid.chunks[0].offset or not grid.level):
        y, now = head_chunk(spec, weights, state, grid)
        first, outputs = grid.chunks[0].stop, [y]
    if first < grid.q.shape[2]:
        y, now = _apply(spec, weights, now, _after(spec, weights, state, grid, first), None)
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
    fields = tokens.pair_fields(spec.pair_gates)
    stretch = _stretch(spec, weights, tokens.q, fields, tokens.gates)
    y, after = _apply(spec, weights, state, stretch, borders)
    halo = spec.window.size - 1
    place = borders[1:, None] + torch.arange(-halo, 0, device=borders.device)  # [N, c-1]
    there = place >= borders[:-1, None]
    window = {n: x[0, :, place.clamp_min(0)].movedim(0, 1) for n, x in fields.items()}
    window = {n: torch.where(_as(there, x), x, 0.0) for n, x in window.items()}
    return y, replace(after, window=_inner(window, state), position=borders.diff())


def _apply(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    stretch: Stretch,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, MemoryState]:
    """Run the op. A memory that decays to its start is, minus its start, one that decays to zero."""
    memory, v = state.memory[WEIGHT], stretch.v
    start = weights[f"memory.{WEIGHT}"] if spec.retention.reads_start else None
    if start is not None:
        memory = memory - start
        if not isinstance(spec.objective, Dot):
            v = (v.to(start) - _read(start, stretch.k)).to(v.dtype)
    given: dict[str, Any] = dict(
        memory=memory, past=stretch.past, cu_seqlens=cu_seqlens, form="fused"
    )
    given |= stretch.gates
    moved, anchor = dict(state.momentum), {}
    if _exact(spec):
        given["after_retention"] = spec.timing.after_retention
        y, memory = delta_rule(stretch.q, stretch.k, v, stretch.eta, **given)
    else:
        y, end = linear_memory(
            stretch.q, stretch.k, v, stretch.eta, **given, momentum=state.momentum.get(WEIGHT),
            chunk=_chunk(spec), length=stretch.length,
            objective="dot" if isinstance(spec.objective, Dot) else "l2",
        )  # fmt: skip
        memory = end.memory
        if end.momentum is not None:
            moved = {WEIGHT: end.momentum}
        anchor = _anchor(
            spec, state, end.anchor if start is None else end.anchor + start, stretch.length
        )
    if start is not None:
        memory, y = memory + start, (y.to(start) + _read(start, stretch.q)).to(y.dtype)
    after = replace(state, memory={WEIGHT: memory}, momentum=moved, anchor=anchor)
    return y.transpose(1, 2), after


def _stretch(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    q: Tensor,
    pairs: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
) -> Stretch:
    """All of a stretch that begins with nothing before it; inputs head-major."""
    x = _features(spec, weights, pairs["k"])
    rule = {n: gates[n].transpose(1, 2) for n in ("log_alpha", "theta") if n in gates}
    gamma = _gamma(
        spec, gates, pad(pairs["gamma"], (spec.window.size - 1, 0)) if _paired(spec) else None, x
    )
    return Stretch(
        q=_features(spec, weights, q),
        k=x,
        v=pairs["v"].transpose(1, 2),
        eta=_eta(spec, gates, x),
        gates=rule | ({} if gamma is None else {"gamma": gamma}),
        past=None,
        length=None,
    )


def _after(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    grid: Grid,
    first: int,
) -> Stretch:
    """The columns of a grid from `first` on, where every row stands on a chunk border."""
    halo = spec.window.size - 1
    pairs = {n: field[:, :, first:] for n, field in grid.pairs.items()}
    dtype = grid.q.dtype
    x = _features(spec, weights, pairs["k"]).to(dtype)
    tokens, valid = x[:, halo:], grid.valid[:, None, first:]
    gates = {n: gate[:, :, first:] for n, gate in grid.gates.items()}
    eta = torch.where(valid, _eta(spec, gates, tokens).transpose(1, 2), 0.0).transpose(1, 2)
    rule = {n: gates[n].transpose(1, 2) for n in ("log_alpha", "theta") if n in gates}
    if "log_alpha" in rule:  # an empty column holds everything still
        rule["log_alpha"] = torch.where(valid.transpose(1, 2), rule["log_alpha"], 0.0)
    gamma = _gamma(spec, gates, pairs.get("gamma"), tokens)
    return Stretch(
        q=_features(spec, weights, grid.q[:, :, first:]),
        k=x,
        v=pairs["v"].transpose(1, 2).to(dtype),
        eta=eta,
        gates=rule | ({} if gamma is None else {"gamma": gamma}),
        past=(state.position + first - grid.shift).clamp(0, halo),
        length=None if grid.full else grid.valid[:, first:].sum(1),
    )


def _eta(spec: MemorySpec, gates: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The step of each token, [B, T, H]. x: its features [B, T, H, F]"""
    energy = x.float().square().sum(-1)
    return spec.optimizer.rate(
        {n: g.transpose(1, 2) for n, g in gates.items() if n == "eta"}, energy
    )


def _gamma(
    spec: MemorySpec, gates: Mapping[str, Tensor], pairs: Tensor | None, like: Tensor
) -> Tensor | None:
    """gamma_{t,j} [B, T, H, c]; None for one pair of weight 1. pairs: gates of pairs [B, H, c-1 + T]"""
    size = spec.window.size
    if pairs is not None:
        return pairs.unfold(-1, size, 1).flip(-1).transpose(1, 2)
    if spec.window.gate == "offset":
        return gates["gamma"].transpose(1, 2)
    if size == 1:
        return None
    return torch.full((*like.shape[:3], size), 1.0 / size, device=like.device)


def _features(spec: MemorySpec, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """phi of [B, H, T, K] in fp32, rounded to the inputs' dtype, [B, T, H, F]"""
    return spec.features(x.float(), weights).to(x.dtype).transpose(1, 2)


def _anchor(
    spec: MemorySpec, state: MemoryState, crossed: Tensor, length: Tensor | None
) -> dict[str, Tensor]:
    """The memory at the last border; rows without tokens keep theirs. Online rules have none."""
    if spec.online:
        return {}
    if length is not None:
        crossed = torch.where((length > 0)[:, None, None, None], crossed, state.anchor[WEIGHT])
    return {WEIGHT: crossed}


def _last_pairs(spec: MemorySpec, tokens: Tokens) -> dict[str, Tensor]:
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


def _paired(spec: MemorySpec) -> bool:
    return spec.window.gate == "pair"


def _exact(spec: MemorySpec) -> bool:
    """The online rule whose slopes read the memory of the token before."""
    return spec.online and not slopes_are_free(spec)


def _chunk(spec: MemorySpec) -> int:
    return LINEAR_TILE if spec.online else spec.timing.chunk
