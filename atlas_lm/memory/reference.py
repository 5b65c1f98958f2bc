"""Token by token, any spec: the definition that every other form is measured against."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from atlas_lm.memory import pairs
from atlas_lm.memory.architectures import dense
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState, initial_memory
from atlas_lm.memory.tokens import Tokens
from atlas_lm.memory.trace import total_norm

Norms = dict[str, Tensor]  # surprise, memory_norm, momentum_norm: [B, H] each


def run(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, tokens: Tokens, trace: bool
) -> tuple[Tensor, MemoryState, Norms]:
    """Write and read every token in turn. Returns y [B, H, T, V], the state, and norms [B, H, T]."""
    step = pairs.write_and_read if spec.keeps_pairs else write_and_read
    if spec.keeps_pairs:
        state = pairs.make_room(state, tokens.count)
    outputs, seen = [], []
    for token in tokens.each():
        y, after, norms = step(spec, weights, state, token, trace)
        if token.valid is not None:
            y, after = y * token.valid[:, None, None], after.where(token.valid, state)
            norms = {name: norm * token.valid[:, None] for name, norm in norms.items()}
        state = after
        outputs.append(y)
        seen.append({name: norm.detach() for name, norm in norms.items()})
    if spec.keeps_pairs:
        state = pairs.trim(state)
    return (
        torch.stack(outputs, dim=2),
        state,
        {name: torch.stack([one[name] for one in seen], dim=2) for name in seen[0]},
    )


def write_and_read(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, token: Tokens, trace: bool
) -> tuple[Tensor, MemoryState, Norms]:
    """Write one pair, then read one query. token: one per row, q and k [B, H, K], v [B, H, V]."""
    network = spec.network
    position, gates, start = state.position, token.gates, initial_memory(spec, weights)
    anchor, momentum = turn(spec, state)

    # retain: what is left of M_{t-1}, and the point at which slopes are taken
    log_alpha = _scalar(gates["log_alpha"]) if "log_alpha" in gates else torch.zeros(())
    kept = {n: spec.retention.keep(m, log_alpha, start[n]) for n, m in state.memory.items()}
    point = kept if spec.timing.after_retention else state.memory if spec.online else anchor

    # encode and predict: the window's pairs, oldest first, this one last
    fields = token.pair_fields(spec.pair_gates)
    window = {n: torch.cat([state.window[n], f.unsqueeze(2)], dim=2) for n, f in fields.items()}
    x = spec.features(window["k"], weights)  # [B, H, c, F]
    prediction, tape = network.predict(dense(point), x, weights)

    # slope and gather: G_t = sum_j gamma_{t,j} d l / d M
    error = spec.objective.slope(prediction, window["v"], window)
    gamma = spec.window.weights_at(gates, window, present(spec, position))  # [B, H, c]
    slopes = network.slopes(point, tape, error, weights)
    grad = {n: (gamma.unsqueeze(-1) * left).mT @ right for n, (left, right) in slopes.items()}

    # step
    eta = _scalar(spec.optimizer.rate(gates, x[:, :, -1].square().sum(-1)))
    first = (position % spec.timing.period == 0).unsqueeze(1)
    theta = spec.optimizer.carry(gates, first)
    due = ((position + 1) % spec.timing.period == 0)[:, None, None, None]
    memory: dict[str, Tensor] = {}
    moved: dict[str, Tensor] = {}
    for n in state.memory:
        step, s = spec.optimizer.update(
            grad[n], momentum.get(n), eta, None if theta is None else _scalar(theta), due
        )
        settled = spec.retention.settle(kept[n] + step, start[n])
        memory[n] = torch.where(due, settled, kept[n] + step)
        moved |= {} if s is None else {n: s}

    # read
    y, _ = network.predict(dense(memory), spec.features(token.q.unsqueeze(2), weights), weights)
    after = replace(
        state,
        memory=memory,
        anchor=anchor,
        momentum=moved,
        window={n: pair[:, :, 1:] for n, pair in window.items()},
        position=position + 1,
    )
    norms = {}
    if trace:
        norms = {"surprise": _norm(grad), "memory_norm": _norm(memory)}
        norms |= {"momentum_norm": _norm(moved)} if moved else {}
    return y.squeeze(2), after, norms


def turn(spec: MemorySpec, state: MemoryState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a chunk border the anchor becomes the memory, and a truncated momentum loses its history."""
    border = (state.position % spec.timing.chunk == 0)[:, None, None, None]
    anchor = {n: torch.where(border, state.memory[n], a) for n, a in state.anchor.items()}
    cut = spec.optimizer.at_border
    return anchor, {n: torch.where(border, cut(s), s) for n, s in state.momentum.items()}


def present(spec: MemorySpec, position: Tensor) -> Tensor:
    """[B, c] bool, oldest first: False for pairs from before the stream began."""
    age = torch.arange(spec.window.size - 1, -1, -1, device=position.device)
    return position.unsqueeze(1) >= age


def _scalar(gate: Tensor) -> Tensor:
    """[B, H] -> [B, H, 1, 1]"""
    return gate[..., None, None]


def _norm(matrices: Mapping[str, Tensor]) -> Tensor:
    return total_norm([matrix.norm(dim=(-2, -1)) for matrix in matrices.values()])
