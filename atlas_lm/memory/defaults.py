"""Gate values to start from: where every preset is stable, and what a layer's gates begin at."""

import torch
from torch import Tensor

from atlas_lm.memory.architectures import KeptPairs, Matrix
from atlas_lm.memory.objectives import Dot
from atlas_lm.memory.optimizers import Momentum, Muon
from atlas_lm.memory.spec import MemorySpec

THETA, DELTA = 0.9, 1.0
HORIZON = 64  # chunks until an unused memory has faded to 1/e


def gate_defaults(spec: MemorySpec) -> dict[str, float]:
    """One value per gate that the spec reads (docs/mathematics.md, section 6, says why).

    A key repeated through a chunk is pushed chunk times from one anchor, and momentum repeats a push
    1/(1 - theta) times, so the step shrinks by both. The dot objective never has enough, and the layers
    of a deep memory feed each other's growth, so there all pushes of a horizon together count as one.
    Newton-Schulz makes every step of unit size: there eta is the size, shared by the jumps of a chunk.
    """
    if isinstance(spec.optimizer, Muon):
        push = 0.05 * spec.timing.period / spec.timing.chunk
    else:
        push = 0.5 if spec.online else 1.0 / spec.timing.chunk
        push *= 1 - THETA if isinstance(spec.optimizer, Momentum) else 1
        deep = not isinstance(spec.architecture, Matrix | KeptPairs)
        push /= HORIZON if deep and isinstance(spec.objective, Dot) else 1
    values = {
        "log_alpha": -1.0 / (HORIZON * max(spec.timing.chunk, 16)),
        "eta": push,
        "theta": THETA,
        "gamma": 1.0 / spec.window.size,
        "delta": DELTA,
    }
    return {name: values[name] for name in spec.gates}


def default_gates(
    spec: MemorySpec,
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Constant gates at their defaults, shaped for `memorize`."""
    return {
        name: torch.full(
            spec.gates[name].shape(batch, tokens, spec.heads), value, dtype=dtype, device=device
        )
        for name, value in gate_defaults(spec).items()
    }
