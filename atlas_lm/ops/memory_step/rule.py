"""What one step is told: the rule, which kernels are compiled for, and the tensors it reads and writes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Gamma = Literal["fixed", "offset", "pair"]


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """The part of a memory's rule that is no tensor."""

    activation: Literal["gelu", "silu"] = "gelu"
    skip: bool = False  # the input is added to the output; features and values have one width
    objective: Literal["l2", "dot", "huber"] = "l2"
    delta: float | None = None  # of huber: where it turns linear; None: a gate of the pair
    gamma: Gamma = "fixed"  # who brings the weights of the window's pairs
    retention: Literal["keep", "decay", "decay_to_start"] = "keep"
    after_retention: bool = False  # online: slopes at what is left of the memory
    chunk: int = 1  # tokens that share an anchor; 1: slopes at the memory itself


class Pairs(NamedTuple):
    """The last c-1 pairs, oldest first: what the window keeps of them."""

    k: Tensor  # [B, H, c-1, K]
    v: Tensor  # [B, H, c-1, V]
    gamma: Tensor | None = None  # [B, H, c-1], where it belongs to the pair
    delta: Tensor | None = None  # [B, H, c-1]


class StepState(NamedTuple):
    """A memory between two tokens. Weights are (w0,), (w0, w1) or (w0, w1, gate), each [B, H, O, I]."""

    memory: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]  # () for chunk 1
    momentum: tuple[Tensor, ...]  # () for plain descent
    window: Pairs
    position: Tensor  # [B] int64


class StepToken(NamedTuple):
    """One token of every row."""

    x: Tensor  # [B, H, c+1, F]: features of the window's keys, oldest first, its own, then of its query
    k: Tensor  # [B, H, K], as the window keeps it
    v: Tensor  # [B, H, V]
    eta: Tensor  # [B, H]
    log_alpha: Tensor | None = None  # [B, H]
    theta: Tensor | None = None  # [B, H]
    gamma: Tensor | None = None  # [B, H, c] newest pair first (offset), or [B, H] (pair)
    delta: Tensor | None = None  # [B, H]
    valid: Tensor | None = None  # [B] bool; False: the state stays, and zero is read


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How the projections of a token stand side by side: q, k, v, inner values of the gates, anything."""

    heads: int
    key: int  # K
    value: int  # V
    rank: int  # inner values of each gate, gate by gate
    gates: tuple[str, ...]  # eta, log_alpha, theta, gamma, delta: how each is squashed
    values: tuple[int, ...]  # of each gate, per head
    window: int  # c: gamma is at most 1/c
    margin: float  # steps and decays below it are none; 0: gates are smooth
    step: float  # eta at most, if there is a margin
    unit_keys: bool  # bring q and k to unit length
    unit_features: bool  # bring the features to unit length, and leave k as it is
