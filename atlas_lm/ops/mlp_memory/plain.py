"""What is plain PyTorch in every form: activations, the output norm, Muon's step."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from atlas_lm.ops.mlp_memory.record import Muon, Norm
from atlas_lm.ops.newton_schulz import newton_schulz

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "silu": silu}
EPS = 1e-6  # of the norm


def normed(read: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """x + LN(read) * scale + bias"""
    return x + standardised(read)[0] * norm.scale + norm.bias


def standardised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zero mean and unit variance over the last axis; and the inverse deviation."""
    centred = x - x.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return centred * inverse, inverse


def orthogonal(muon: Muon, s: Tensor) -> Tensor:
    return newton_schulz(s, muon.steps, name=muon.schedule, eps=muon.eps, form="parallel")
