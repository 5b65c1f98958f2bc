"""The exact online rule token by token: the definition."""

import torch
from torch import Tensor

from atlas_lm.ops.delta_rule.record import Problem, each_sequence


@each_sequence
def delta_rule_reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """M_t = alpha_t M_{t-1} - eta_t sum_j gamma_{t,j} e_{t,j} k_{t-j}^T, y_t = M_t q_t, as a loop."""
    p, state = problem, problem.memory
    q, k, v, eta = (x.to(state) for x in (p.q, p.k, p.v, p.eta))
    reads: list[Tensor] = []
    for t in range(q.shape[1]):
        kept = state if p.log_alpha is None else _per_head(p.log_alpha[:, t].exp()) * state
        point = kept if p.after_retention else state
        step = torch.zeros_like(state)
        for j in range(p.window):
            i = p.before + t - j
            if i < 0:
                break
            weight = torch.ones_like(eta[:, t]) if p.gamma is None else p.gamma[:, t, :, j]
            if p.past is not None:
                weight = torch.where((t - j >= -p.past).unsqueeze(1), weight, 0.0)
            error = torch.einsum("bhvf,bhf->bhv", point, k[:, i]) - v[:, i]
            step = step + _per_head(weight) * error.unsqueeze(-1) * k[:, i].unsqueeze(-2)
        state = kept - _per_head(eta[:, t]) * step
        reads.append(torch.einsum("bhvf,bhf->bhv", state, q[:, t]).to(p.q.dtype))
    return torch.stack(reads, dim=1) if reads else v[:, :0].to(p.q.dtype), state


def _per_head(gate: Tensor) -> Tensor:
    """[B, H] -> [B, H, 1, 1], to scale a matrix per head."""
    return gate[..., None, None]
