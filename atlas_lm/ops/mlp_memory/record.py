"""What a two-layer memory with a chunk anchor is asked, flat, and what it leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from atlas_lm.ops.sequences import Sequences


class Weights(NamedTuple):
    """Of skip(z) + W1 (s(W0 z) * Wg z); without a gate, of skip(z) + W1 s(W0 z)."""

    w0: Tensor  # [..., D, F]
    w1: Tensor  # [..., V, D]
    gate: Tensor | None = None  # [..., D, F]

    def map(self, change: Callable[..., Tensor], *others: "Weights") -> "Weights":
        """Weight by weight; `change` also gets the same one of every other."""
        columns = zip(self, *others, strict=True)
        return Weights(*(None if w[0] is None else change(*w) for w in columns))  # type: ignore[arg-type]

    @property
    def given(self) -> list[Tensor]:
        return [w for w in self if w is not None]


class Norm(NamedTuple):
    """Of z + LN(W1 ...) * scale + bias."""

    scale: Tensor  # [H, V]
    bias: Tensor  # [H, V]


class MLPState(NamedTuple):
    """All fp32, [N, H, ...]."""

    memory: Weights
    anchor: Weights  # the memory at the last chunk border that was crossed
    momentum: Weights | None  # None for descent


@dataclass(frozen=True, kw_only=True)
class Muon:
    """S_t = theta_t S_{t-1} + G_t, and M_t = alpha_t M_{t-1} - eta_t NS(S_t) at the end of every period."""

    period: int  # tokens; the chunk is a multiple of it
    steps: int = 5
    schedule: str = "muon"
    eps: float = 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Checked inputs, rows of all sequences end to end."""

    q: Tensor  # [R, H, F]
    k: Tensor  # [R', H, F]
    v: Tensor  # [R', H, V]
    eta: Tensor  # [R, H] fp32
    log_alpha: Tensor | None  # [R, H] fp32
    theta: Tensor | None  # [R, H] fp32
    gamma: Tensor | None  # [R, H, c] fp32
    memory: Weights  # [N, H, ...] fp32
    momentum: Weights | None  # [N, H, ...] fp32
    start: Weights | None  # [H, ...] fp32, where the memory decays to; None: zero
    sequences: Sequences
    objective: Literal["l2", "dot"]
    activation: Literal["gelu", "silu"]
    skip: bool
    norm: Norm | None  # fp32
    muon: Muon | None

    @property
    def window(self) -> int:
        return 1 if self.gamma is None else self.gamma.shape[-1]

    @property
    def sizes(self) -> Sequence[int]:
        """F, D, V"""
        return self.q.shape[-1], self.memory.w0.shape[-2], self.v.shape[-1]
