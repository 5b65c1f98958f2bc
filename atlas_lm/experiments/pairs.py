"""Random pairs, writing them through `memorize`, reading them through `recall`, and two scores.

Every experiment tries a few step sizes: each is one row of the batch, so a grid costs one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atlas_lm.memory import MemorySpec, memorize, recall


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """n pairs for each of D independent draws."""

    keys: Tensor  # [D, n, K], unit length
    values: Tensor  # [D, n, V], unit length


def draw_pairs(
    generator: torch.Generator,
    draws: int,
    count: int,
    key_dim: int,
    value_dim: int,
    scale: Tensor | None = None,
) -> Pairs:
    """Gaussian directions; scale: [K] stretches the coordinates of the keys, which correlates them."""
    keys = torch.randn(draws, count, key_dim, generator=generator)
    values = torch.randn(draws, count, value_dim, generator=generator)
    return Pairs(
        keys=normalize(keys if scale is None else keys * scale, dim=-1),
        values=normalize(values, dim=-1),
    )


def write_then_recall(
    spec: MemorySpec,
    pairs: Pairs,
    steps: Sequence[float],
    *,
    passes: int = 1,
    course: Tensor | None = None,
) -> Tensor:
    """Write all pairs `passes` times in order, then read every key: y_i = A(M; phi(k_i)).

    steps: the E step sizes to try   course: [passes], what share of its step a pass takes; default 1
    returns [E, D, n, V]
    """
    draws, count, _ = pairs.keys.shape
    keys = pairs.keys.repeat(len(steps), 1, 1).unsqueeze(2)  # [E*D, n, 1, K]
    values = pairs.values.repeat(len(steps), 1, 1).unsqueeze(2)
    shares = torch.ones(passes) if course is None else course
    eta = torch.outer(torch.tensor(steps).repeat_interleave(draws), shares.repeat_interleave(count))
    gates = {"eta": eta.unsqueeze(-1)}
    if "theta" in spec.gates:
        gates["theta"] = torch.zeros_like(gates["eta"])
    stream, targets = keys.repeat(1, passes, 1, 1), values.repeat(1, passes, 1, 1)
    weights = spec.init_weights()
    with torch.inference_mode():
        _, state = memorize(spec, weights, None, stream, stream, targets, gates)
        reads = recall(spec, weights, state, keys)
    return reads.reshape(len(steps), draws, count, -1)


def recalled(reads: Tensor, values: Tensor) -> Tensor:
    """1 where the stored value nearest to a read is the right one, else 0; chance is 1/n.

    Values have unit length, so nearest by distance is nearest by cosine. A read that is not finite is
    wrong.   reads: [..., n, V]   values: broadcasts to reads   returns [..., n]
    """
    alike = reads @ values.mT
    right = alike.argmax(-1) == torch.arange(reads.shape[-2])
    return (right & reads.isfinite().all(-1)).float()


def relative_error(reads: Tensor, values: Tensor) -> Tensor:
    """|Y - V| / |V| over the n pairs of a draw. reads, values: [..., n, V]   returns [...]"""
    error = (reads - values).norm(dim=(-2, -1)) / values.norm(dim=(-2, -1))
    return error.nan_to_num(nan=float("inf"))
