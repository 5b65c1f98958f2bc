"""The exact online rule token by token: the definition."""

import torch
from torch import Tensor

from atlas_lm.ops.delta_rule.apart import each_sequence


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    *,
    log_alpha: Tensor | None = None,
    gamma: Tensor | None = None,
    memory: Tensor | None = None,
    after_retention: bool = False,
    past: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """M_t = alpha_t M_{t-1} - eta_t sum_j gamma_{t,j} e_{t,j} k_{t-j}^T, y_t = M_t q_t, as a loop.

    Shapes and meanings as in `delta_rule`; computes in the dtype of the inputs.
    """
    if cu_seqlens is not None:
        gates = {"log_alpha": log_alpha, "gamma": gamma}
        return each_sequence(
            delta_rule_reference, cu_seqlens, (q, k, v, eta), gates, memory, after_retention
        )
    batch, tokens, heads, features = q.shape
    before = k.shape[1] - tokens
    state = q.new_zeros(batch, heads, v.shape[-1], features) if memory is None else memory
    reads: list[Tensor] = []
    for t in range(tokens):
        kept = state if log_alpha is None else _per_head(log_alpha[:, t].exp()) * state
        point = kept if after_retention else state
        step = torch.zeros_like(state)
        for j in range(1 if gamma is None else gamma.shape[-1]):
            i = before + t - j
            if i < 0:
                break
            weight = torch.ones_like(eta[:, t]) if gamma is None else gamma[:, t, :, j]
            if past is not None:
                weight = torch.where((t - j >= -past).unsqueeze(1), weight, 0.0)
            error = torch.einsum("bhvf,bhf->bhv", point, k[:, i]) - v[:, i]
            step = step + _per_head(weight) * error.unsqueeze(-1) * k[:, i].unsqueeze(-2)
        state = kept - _per_head(eta[:, t]) * step
        reads.append(torch.einsum("bhvf,bhf->bhv", state, q[:, t]))
    return torch.stack(reads, dim=1) if reads else q.new_zeros(*q.shape[:3], v.shape[-1]), state


def _per_head(gate: Tensor) -> Tensor:
    """[B, H] -> [B, H, 1, 1], to scale a matrix per head."""
    return gate[..., None, None]
