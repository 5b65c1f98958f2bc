"""Tokens as the fused ops take them: [B, T, H, ...] from a chunk border on, their features made, and in front
of them the pairs that their windows still hold."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.layout import Grid
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.tokens import Tokens


@dataclass(frozen=True)
class Operands:
    """P is the number of pairs before the first token."""

    q: Tensor  # phi(q) [B, T, H, F], in the inputs' dtype; F: `width`
    k: Tensor  # phi(k) [B, P + T, H, F]
    v: Tensor  # [B, P + T, H, V]
    eta: Tensor  # [B, T, H]
    gates: dict[str, Tensor]  # log_alpha, theta [B, T, H], gamma [B, T, H, c]: those of the rule
    past: Tensor | None = None  # [B], pairs that exist of the P; None: all
    length: Tensor | None = None  # [B], tokens of each row; None: all
    cu_seqlens: Tensor | None = None  # [N+1], borders of sequences packed into one row


def of_fresh(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    tokens: Tokens,
    cu_seqlens: Tensor | None = None,
) -> Operands:
    """All of the tokens, with nothing before them and no padding among them."""
    x = _features(spec, weights, tokens.k)
    pairs = None
    if spec.window.gate == "pair":
        pairs = pad(tokens.gates["gamma"], (spec.window.size - 1, 0))
    return Operands(
        q=_features(spec, weights, tokens.q),
        k=x,
        v=tokens.v.transpose(1, 2),
        eta=_eta(spec, tokens.gates, x),
        gates=_rule(spec, tokens.gates, pairs, x),
        cu_seqlens=cu_seqlens,
    )


def of_grid(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, grid: Grid, first: int
) -> Operands:
    """The columns of a grid from `first` on, where every row stands on a chunk border.

    state: before the grid
    """
    halo, dtype = spec.window.size - 1, grid.q.dtype
    pairs = {n: field[:, :, first:] for n, field in grid.pairs.items()}
    gates = {n: gate[:, :, first:] for n, gate in grid.gates.items()}
    valid = grid.valid[:, first:, None]
    x = _features(spec, weights, pairs["k"].to(dtype))
    rule = _rule(spec, gates, pairs.get("gamma"), x[:, halo:])
    if "log_alpha" in rule:  # an empty column holds everything still
        rule["log_alpha"] = torch.where(valid, rule["log_alpha"], 0.0)
    return Operands(
        q=_features(spec, weights, grid.q[:, :, first:]),
        k=x,
        v=pairs["v"].transpose(1, 2).to(dtype),
        eta=torch.where(valid, _eta(spec, gates, x[:, halo:]), 0.0),
        gates=rule,
        past=(state.position + first - grid.shift).clamp(0, halo),
        length=None if grid.full else grid.valid[:, first:].sum(1),
    )


def width(spec: MemorySpec) -> int:
    """Columns that features stand in: for two layers, where kernels are faster so, odd numbers of them are
    filled up with zeros to whole sixteens. Not where a read adds its query, as many features as values."""
    features = spec.feature_dim
    even = isinstance(spec.architecture, Matrix) or skips(spec) or features % 8 == 0
    return features if even else features + -features % 16


def skips(spec: MemorySpec) -> bool:
    """A read adds its query to what the weights say: wanted, and there are as many features as values."""
    network = spec.network
    return (network.skip or network.norm) and spec.feature_dim == spec.value_dim


def _features(spec: MemorySpec, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """phi of [B, H, T, K] in fp32, rounded to x's dtype, [B, T, H, F]; F: `width`"""
    return spec.features.fused(x, weights, width(spec))


def _eta(spec: MemorySpec, gates: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The step of each token, [B, T, H]. gates: head-major   x: its features [B, T, H, F]"""
    energy = x.float().square().sum(-1)
    eta = {n: gate.transpose(1, 2) for n, gate in gates.items() if n == "eta"}
    return spec.optimizer.rate(eta, energy)


def _rule(
    spec: MemorySpec, gates: Mapping[str, Tensor], pairs: Tensor | None, x: Tensor
) -> dict[str, Tensor]:
    """The gates besides eta. gates: head-major   pairs: gates of pairs [B, H, c-1 + T]   x: features"""
    rule = {n: gates[n].transpose(1, 2) for n in ("log_alpha", "theta") if n in gates}
    gamma = _gamma(spec, gates, pairs, x)
    return rule if gamma is None else rule | {"gamma": gamma}


def _gamma(
    spec: MemorySpec, gates: Mapping[str, Tensor], pairs: Tensor | None, x: Tensor
) -> Tensor | None:
    """gamma_{t,j} [B, T, H, c]; None for one pair of weight 1."""
    size = spec.window.size
    if pairs is not None:
        return pairs.unfold(-1, size, 1).flip(-1).transpose(1, 2)
    if spec.window.gate == "offset":
        return gates["gamma"].transpose(1, 2)
    if size == 1:
        return None
    return torch.full((*x.shape[:3], size), 1.0 / size, device=x.device)
