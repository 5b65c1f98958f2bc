"""One step written out in PyTorch, in any dtype: what the kernels are held against."""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from atlas_lm.ops.memory_step.rule import Pairs, StepRule, StepState, StepToken

Weights = tuple[Tensor, ...]


def memory_step_reference(
    rule: StepRule, state: StepState, token: StepToken, start: Weights = ()
) -> tuple[Tensor, StepState]:
    """Write one pair, read one query. start: the initial weights [H, O, I], for decay_to_start.

    Returns y [B, H, V] and the next state, as new tensors.
    """
    valid = (
        torch.ones_like(state.position, dtype=torch.bool) if token.valid is None else token.valid
    )
    border = (state.position % rule.chunk == 0) & valid
    anchor = tuple(
        torch.where(_rows(border, a), m, a)
        for m, a in zip(state.memory, state.anchor, strict=False)
    )
    kept = _kept(rule, state.memory, token.log_alpha, start)
    point = kept if rule.after_retention else anchor or state.memory

    window = _push(state.window, token)
    x, q = token.x[:, :, :-1], token.x[:, :, -1:]
    gradient = _gradient(rule, point, x, window, _gamma(rule, token, window, state.position))
    memory, momentum = [], []
    for i, (left, grad) in enumerate(zip(kept, gradient, strict=True)):
        step = -_scalar(token.eta) * grad
        if state.momentum:
            assert token.theta is not None
            step = _scalar(token.theta) * state.momentum[i] + step
            momentum.append(torch.where(_rows(valid, step), step, state.momentum[i]))
        memory.append(torch.where(_rows(valid, left), left + step, state.memory[i]))
    y = _forward(rule, tuple(memory), q)[0].squeeze(2)
    after = StepState(
        memory=tuple(memory),
        anchor=anchor,
        momentum=tuple(momentum),
        window=_shift(window, state.window, valid),
        position=state.position + valid,
    )
    return torch.where(_rows(valid, y), y, 0.0), after


def _kept(
    rule: StepRule, memory: Weights, log_alpha: Tensor | None, start: Weights
) -> tuple[Tensor, ...]:
    if rule.retention == "keep":
        return memory
    assert log_alpha is not None
    alpha = _scalar(log_alpha.exp())
    if rule.retention == "decay":
        return tuple(alpha * m for m in memory)
    return tuple(m0 + alpha * (m - m0) for m, m0 in zip(memory, start, strict=True))


def _push(window: Pairs, token: StepToken) -> Pairs:
    """The window's pairs and this one behind them, [B, H, c, ...]."""

    def behind(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return None if old is None or new is None else torch.cat([old, new.unsqueeze(2)], dim=2)

    return Pairs(
        k=torch.cat([window.k, token.k.unsqueeze(2)], dim=2),
        v=torch.cat([window.v, token.v.unsqueeze(2)], dim=2),
        gamma=behind(window.gamma, token.gamma),
        delta=behind(window.delta, token.delta),
    )


def _shift(window: Pairs, old: Pairs, valid: Tensor) -> Pairs:
    """The last c-1 pairs of the rows that moved, and those of before elsewhere."""

    def newest(pairs: Tensor, before: Tensor) -> Tensor:
        return torch.where(_rows(valid, before), pairs[:, :, 1:], before)

    return Pairs(
        k=newest(window.k, old.k),
        v=newest(window.v, old.v),
        gamma=None if old.gamma is None else newest(cast(Tensor, window.gamma), old.gamma),
        delta=None if old.delta is None else newest(cast(Tensor, window.delta), old.delta),
    )


def _gamma(rule: StepRule, token: StepToken, window: Pairs, position: Tensor) -> Tensor:
    """Weights of the window's pairs, oldest first, [B, H, c]."""
    size = window.v.shape[2]
    present = position.unsqueeze(1) >= torch.arange(size - 1, -1, -1, device=position.device)
    if rule.gamma == "pair":
        assert window.gamma is not None
        gamma = window.gamma
    elif rule.gamma == "offset":
        assert token.gamma is not None
        gamma = token.gamma.flip(-1)
    else:
        gamma = torch.full_like(window.v[..., 0], 1 / size)
    return gamma * present.unsqueeze(1)


def _forward(rule: StepRule, memory: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prediction, pre-activation, gate and hidden units; the last three are x for a plain matrix."""
    activate = gelu if rule.activation == "gelu" else silu
    a = g = hidden = x
    core = x @ memory[0].mT
    if len(memory) > 1:
        a = core
        g = x @ memory[2].mT if len(memory) == 3 else torch.ones_like(a)
        hidden = activate(a) * g
        core = hidden @ memory[1].mT
    return (x + core if rule.skip else core), a, g, hidden


def _gradient(
    rule: StepRule, point: Weights, x: Tensor, window: Pairs, gamma: Tensor
) -> list[Tensor]:
    """sum_n gamma_n dl/dW, for each weight."""
    prediction, a, g, hidden = _forward(rule, point, x)
    error = -window.v if rule.objective == "dot" else prediction - window.v
    if rule.objective == "huber":
        norm = error.norm(dim=-1)
        delta = window.delta if rule.delta is None else rule.delta
        error = error * torch.where(norm > delta, delta / norm, 1.0).unsqueeze(-1)
    weighted = gamma.unsqueeze(-1) * error
    if len(point) == 1:
        return [weighted.mT @ x]
    u, slope = weighted @ point[1], _derivative(rule.activation, a)
    gradients = [(u * g * slope).mT @ x, weighted.mT @ hidden]
    if len(point) == 3:
        gradients.append((u * (gelu if rule.activation == "gelu" else silu)(a)).mT @ x)
    return gradients


def _derivative(activation: str, a: Tensor) -> Tensor:
    if activation == "silu":
        s = torch.sigmoid(a)
        return s * (1 + a * (1 - s))
    density = torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(a / math.sqrt(2))) + a * density


def _scalar(gate: Tensor) -> Tensor:
    return gate[..., None, None]


def _rows(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (like.dim() - 1))
