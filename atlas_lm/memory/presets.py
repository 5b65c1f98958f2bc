"""Named points of the space, one short function each; docs/mathematics.md gives their equations.

Every preset takes heads, key_dim and value_dim, and whatever `MemorySpec.replace` takes: parts to
exchange, or chunk, period and after_retention.
"""

from collections.abc import Callable
from typing import Any

from atlas_lm.memory.architectures import MLP, GatedMLP, KeptPairs, Matrix
from atlas_lm.memory.features import Exponential, Identity, Polynomial, Taylor, Unit
from atlas_lm.memory.objectives import L2, Dot, Huber
from atlas_lm.memory.optimizers import Descent, ImplicitDescent, Momentum, Muon
from atlas_lm.memory.retention import Decay, Keep, Renormalise
from atlas_lm.memory.spec import MemorySpec, Timing, retime
from atlas_lm.memory.windows import Window

CHUNK = 64  # tokens that share an anchor in the deep presets
WINDOW = Window(size=16, gate="offset")  # the Omega rule's c, one gate per offset
MONOMIALS = Polynomial(degree=2, project=16)  # 153 features

Parts = dict[str, Any]
PRESETS: dict[str, Callable[[], Parts]] = {}


def build(name: str, *, heads: int, key_dim: int, value_dim: int, **changes: Any) -> MemorySpec:
    """The preset `name` in the given sizes.

    >>> build("atlas", heads=4, key_dim=64, value_dim=64, chunk=32, period=8).timing.chunk
    32
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}, wanted one of {', '.join(PRESETS)}")
    parts = PRESETS[name]() | changes
    timing, parts = retime(parts.pop("timing", Timing()), parts)
    return MemorySpec(heads=heads, key_dim=key_dim, value_dim=value_dim, timing=timing, **parts)


def preset(function: Callable[[], Parts]) -> Callable[[], Parts]:
    PRESETS[function.__name__] = function
    return function


@preset
def linear_attention() -> Parts:
    """M_t = M_{t-1} + v_t k_t^T (Katharopoulos et al. 2020)."""
    return dict(
        architecture=Matrix(),
        features=Identity(),
        objective=Dot(),
        optimizer=Descent(step=1.0),
        retention=Keep(),
    )


@preset
def retnet() -> Parts:
    """M_t = alpha_t M_{t-1} + v_t k_t^T; RetNet's alpha is a constant per head."""
    return linear_attention() | dict(retention=Decay())


@preset
def gla() -> Parts:
    """Gated linear attention with a scalar gate per head: RetNet's rule, alpha from the token."""
    return retnet()


@preset
def softmax_attention() -> Parts:
    """sum_i v_i exp(q.k_i / sqrt K) / sum_i exp(q.k_i / sqrt K): attention as a memory of kept pairs."""
    return dict(
        architecture=KeptPairs(),
        features=Exponential(normalise=True),
        objective=Dot(),
        optimizer=Descent(step=1.0),
        retention=Keep(),
    )


@preset
def deltanet() -> Parts:
    """M_t = M_{t-1} - eta_t (M_{t-1} k_t - v_t) k_t^T (Schlag et al. 2021; Yang et al. 2024)."""
    return dict(
        architecture=Matrix(),
        features=Unit(),
        objective=L2(),
        optimizer=Descent(),
        retention=Keep(),
    )


@preset
def gated_deltanet() -> Parts:
    """The delta rule at alpha_t M_{t-1} (Yang et al. 2024)."""
    return deltanet() | dict(retention=Decay(), timing=Timing(after_retention=True))


@preset
def longhorn() -> Parts:
    """The delta rule with its step solved implicitly: eta / (1 + eta |k|^2) (Liu et al. 2024)."""
    return deltanet() | dict(optimizer=ImplicitDescent())


@preset
def ttt_linear() -> Parts:
    """k + LN(M k) by descent, slopes at the border of 16 tokens (Sun et al. 2024)."""
    return dict(
        architecture=Matrix(norm=True),
        features=Identity(),
        objective=L2(),
        optimizer=Descent(),
        retention=Keep(),
        timing=Timing(chunk=16),
    )


@preset
def ttt_mlp() -> Parts:
    """TTT with a two-layer memory."""
    return ttt_linear() | dict(architecture=MLP(norm=True))


@preset
def titans() -> Parts:
    """Surprise with momentum and forgetting in a deep memory: the LMM of Behrouz et al. 2024."""
    return dict(
        architecture=MLP(),
        features=Unit(),
        objective=L2(),
        optimizer=Momentum(),
        retention=Decay(),
        timing=Timing(chunk=CHUNK),
    )


@preset
def yaad() -> Parts:
    """The Huber objective in a deep memory, its threshold a gate (Miras, Behrouz et al. 2025)."""
    return titans() | dict(objective=Huber(), optimizer=Descent())


@preset
def lact() -> Parts:
    """SwiGLU memory, dot objective, Newton-Schulz once per chunk, rows renormalised (Zhang et al. 2025)."""
    return dict(
        architecture=GatedMLP(activation="silu", skip=False),
        features=Unit(),
        objective=Dot(),
        window=Window(gate="offset"),  # LaCT's step per token stands inside the gradient
        optimizer=Muon(carry_per="period"),
        retention=Renormalise(),
        timing=Timing(chunk=CHUNK, period=CHUNK),
    )


@preset
def dla() -> Parts:
    """Deep linear attention: the dot objective in a deep memory (Atlas)."""
    return titans() | dict(features=MONOMIALS, objective=Dot(), optimizer=Descent())


@preset
def swla() -> Parts:
    """Sliding-window linear attention: the dot objective over the last c pairs (Atlas)."""
    return dict(
        architecture=Matrix(),
        features=MONOMIALS,
        objective=Dot(),
        window=WINDOW,
        optimizer=Descent(),
        retention=Decay(),
    )


@preset
def omeganet() -> Parts:
    """The Omega rule: descent on the last c pairs (Atlas)."""
    return titans() | dict(features=MONOMIALS, window=WINDOW, optimizer=Descent())


@preset
def atlas() -> Parts:
    """The Omega rule with Newton-Schulz on its momentum, once per 16 tokens (Atlas, eq. 32 at period 1)."""
    return omeganet() | dict(optimizer=Muon(), timing=Timing(chunk=CHUNK, period=16))


@preset
def atlas_pp() -> Parts:
    """Atlas with a gated memory."""
    return atlas() | dict(architecture=GatedMLP())


@preset
def titans_atlas() -> Parts:
    """Titans' momentum on the Omega rule: the hybrid that the papers call open. Own."""
    return omeganet() | dict(optimizer=Momentum())


@preset
def deep_transformer() -> Parts:
    """The dot objective in a deep memory of exponential features, here their Taylor series."""
    return titans() | dict(
        features=Taylor(degree=2, project=16),
        objective=Dot(),
        optimizer=Descent(),
        retention=Keep(),
    )


@preset
def swdt() -> Parts:
    """Sliding-window DeepTransformer: the same over the last c pairs."""
    return deep_transformer() | dict(window=WINDOW)


@preset
def dot() -> Parts:
    """Deep Omega Transformer: the L2 objective over the last c pairs, exponential features."""
    return swdt() | dict(objective=L2())


@preset
def deep_transformer_pairs() -> Parts:
    """DeepTransformer on a matrix memory, exact: sum_i v_i exp(q.k_i), pairs kept."""
    return softmax_attention() | dict(
        features=Exponential(scale=1.0, unit=True), optimizer=Descent()
    )


@preset
def swdt_pairs() -> Parts:
    """Sliding-window DeepTransformer on a matrix memory, exact."""
    return deep_transformer_pairs() | dict(window=WINDOW)


@preset
def dot_pairs() -> Parts:
    """Dot on a matrix memory, exact: the Omega rule in the exponential kernel."""
    return swdt_pairs() | dict(objective=L2())
