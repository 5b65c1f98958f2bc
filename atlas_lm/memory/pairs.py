"""Memories of kept pairs: the exponential kernel, exact, token by token and in tiles.

M_t = sum_i w_i phi(k_i)^T without ever forming phi: keys are kept, coefficients w_i are learned. Pair i
of a row lives in slot i; slots that are not filled yet have coefficient zero.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from atlas_lm.memory.basis import DENSE
from atlas_lm.memory.features import Exponential
from atlas_lm.memory.objectives import Dot
from atlas_lm.memory.online import pair_rows, row_writes
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.stretch import Stretch
from atlas_lm.memory.tokens import Tokens
from atlas_lm.memory.trajectory import points, unroll
from atlas_lm.ops.triangular_solve import triangular_solve


def make_room(state: MemoryState, tokens: int) -> MemoryState:
    """Empty slots for `tokens` more pairs in every row. What no row has filled yet is zero."""
    slots = int(state.position.max()) + tokens
    filled = torch.arange(slots, device=state.position.device) < state.position.unsqueeze(1)

    def grow(kept: Tensor) -> Tensor:
        kept = pad_tensor(kept, (0, 0, 0, slots - kept.shape[2]))
        return torch.where(filled[:, None, :, None], kept, 0.0)

    return replace(state, memory={n: grow(kept) for n, kept in state.memory.items()})


def trim(state: MemoryState) -> MemoryState:
    """Drop the slots that no row has filled."""
    slots = int(state.position.max())
    return replace(state, memory={n: m[:, :, :slots] for n, m in state.memory.items()})


def read(spec: MemorySpec, memory: Mapping[str, Tensor], q: Tensor) -> Tensor:
    """sum_i w_i kappa(k_i, q), divided by the summed weights if the spec says so. q: phi(q) [B, H, n, K]"""
    coefficients = memory["coefficients"]
    logits = _kernel(spec).logits(q, memory["keys"])
    if _kernel(spec).normalise:
        logits = torch.where(coefficients[..., -1].unsqueeze(2) > 0, logits, -torch.inf)
    return _finish(spec, (logits - _height(spec, logits)).exp() @ coefficients)


def write_and_read(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, token: Tokens, trace: bool
) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
    """One token of the Omega rule on coefficients: w_i -= eta_t gamma_{t,t-i} e_{t,t-i}."""
    device = token.q.device
    fields = token.pair_fields(spec.pair_gates)
    window = {n: torch.cat([state.window[n], f.unsqueeze(2)], dim=2) for n, f in fields.items()}
    x = spec.features(window["k"], weights)  # [B, H, c, K]
    age = torch.arange(spec.window.size - 1, -1, -1, device=device)
    places = state.position.unsqueeze(1) - age  # the slot of each pair of the window, [B, c]
    slots = torch.arange(state.memory["keys"].shape[2], device=device)
    here = (places.unsqueeze(2) == slots).unsqueeze(1)  # [B, 1, c, n]

    keys = torch.where(here[:, :, -1, :, None], x[:, :, -1:], state.memory["keys"])
    coefficients = state.memory["coefficients"]
    prediction = _kernel(spec).logits(x, keys).exp() @ coefficients
    error = spec.objective.slope(prediction, _targets(spec, window["v"]), window)
    gamma = spec.window.weights_at(token.gates, window, places >= 0)
    gradient = gamma.unsqueeze(-1) * error  # [B, H, c, V]
    eta = spec.optimizer.rate(token.gates, gamma[..., -1])[..., None, None]
    coefficients = coefficients - eta * (here.to(x.dtype).mT @ gradient)

    memory = {"keys": keys, "coefficients": coefficients}
    y = read(spec, memory, spec.features(token.q.unsqueeze(2), weights)).squeeze(2)
    after = replace(
        state,
        memory=memory,
        window={n: pair[:, :, 1:] for n, pair in window.items()},
        position=state.position + 1,
    )
    norms = {}
    if trace:
        sizes = {"surprise": gradient, "memory_norm": coefficients}
        norms = {n: x[..., : spec.value_dim].norm(dim=(-2, -1)) for n, x in sizes.items()}
    return y, after, norms


def tile(
    spec: MemorySpec, memory: dict[str, Tensor], slots: Tensor, stretch: Stretch, trace: bool
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """One tile of the same rule: its errors solve a triangular system, as in `online`.

    memory: keys of this tile already in their slots   slots: [B, c-1 + T], the slot of each pair
    returns y [B, H, T, V], the memory after the tile, and norms [B, H, T]
    """
    keys, coefficients = memory["keys"], memory["coefficients"]
    size, tokens = spec.window.size, stretch.valid.shape[1]
    rows = pair_rows(size, tokens, keys.device)
    index = slots.clamp_min(0)[:, None, :, None]
    kept = keys.gather(2, index.expand_as(stretch.x))[:, :, rows]  # where each row writes
    writes, at = row_writes(spec, stretch), stretch.pace(spec)
    unrolled, _ = unroll(spec, writes, at)
    error = -_targets(spec, stretch.pairs["v"])[:, :, rows]
    if not isinstance(spec.objective, Dot):
        kernel = _kernel(spec).logits(stretch.x[:, :, rows], kept).exp()
        known = (_kernel(spec).logits(stretch.x, keys).exp() @ coefficients)[:, :, rows] + error
        point = points(spec, unrolled, at).repeat_interleave(size, dim=2)
        error = triangular_solve(point[..., DENSE:] * kernel, known)

    mix = unrolled[..., DENSE:]  # [B, H, T, T*c]: -eta gamma of every row written so far
    own = slots[:, size - 1 :]  # the slot of each token
    seen = torch.arange(keys.shape[2], device=keys.device) <= own.unsqueeze(2)
    logits = _kernel(spec).logits(stretch.q, keys)
    logits = torch.where(seen.unsqueeze(1), logits, -torch.inf)
    token = torch.arange(tokens, device=keys.device)
    written = token.repeat_interleave(size) <= token.unsqueeze(1)  # [T, T*c]
    fresh = torch.where(written, _kernel(spec).logits(stretch.q, kept), -torch.inf)
    height = _height(spec, logits)
    y = (logits - height).exp() @ coefficients + (mix * (fresh - height).exp()) @ error

    shape = (*error.shape[:2], stretch.x.shape[2], error.shape[-1])
    change = error.new_zeros(shape).index_add(2, rows, mix[:, :, -1, :, None] * error)
    index = index.expand(shape)
    after = {"keys": keys, "coefficients": coefficients.scatter_add(2, index, change)}
    norms = {}
    if trace:
        here = coefficients.gather(2, index)
        norms = _norms(spec, here, coefficients, writes, mix, error, rows)
    return _finish(spec, y), after, norms


def _norms(
    spec: MemorySpec,
    here: Tensor,
    coefficients: Tensor,
    writes: Tensor,
    mix: Tensor,
    error: Tensor,
    rows: Tensor,
) -> dict[str, Tensor]:
    """Surprise and size of the coefficients at every token of a tile. here: those of the tile's pairs"""
    here, coefficients, error = (w[..., : spec.value_dim] for w in (here, coefficients, error))
    moved = here.new_zeros(*mix.shape[:3], *here.shape[2:])
    moved = here.unsqueeze(2) + moved.index_add(3, rows, mix.unsqueeze(-1) * error.unsqueeze(2))
    gain = moved.square().sum((-2, -1)) - here.square().sum((-2, -1)).unsqueeze(2)
    total = coefficients.square().sum((-2, -1)).unsqueeze(2) + gain
    return {
        "surprise": (writes.square() @ error.square().sum(-1, keepdim=True)).squeeze(-1).sqrt(),
        "memory_norm": total.clamp_min(0).sqrt(),
    }


def _kernel(spec: MemorySpec) -> Exponential:
    assert isinstance(spec.features, Exponential)
    return spec.features


def _targets(spec: MemorySpec, v: Tensor) -> Tensor:
    """Values; with a normalised read one more column of ones, which collects the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1) if _kernel(spec).normalise else v


def _height(spec: MemorySpec, logits: Tensor) -> Tensor:
    """What may be subtracted from the logits before exp: their maximum where the read is normalised."""
    if not _kernel(spec).normalise or logits.shape[-1] == 0:
        return torch.zeros_like(logits[..., :1].sum(-1, keepdim=True))
    highest = logits.amax(-1, keepdim=True).detach()
    return torch.where(highest.isfinite(), highest, 0.0)


def _finish(spec: MemorySpec, sums: Tensor) -> Tensor:
    if not _kernel(spec).normalise:
        return sums
    weight = sums[..., -1:]
    return sums[..., :-1] / torch.where(weight > 0, weight, 1.0)
