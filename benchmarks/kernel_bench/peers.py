"""Rows of other projects: flash-linear-attention (fla-core) and PyTorch's attention, width 1024."""

import importlib
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.kernel_bench.cases import Call, Case, Tensors, Tokens
from benchmarks.kernel_bench.counts import (
    attention_flops,
    delta_flops,
    linear_flops,
    token_bytes,
)
from benchmarks.kernel_bench.inputs import Draw, learned, pairs

BASE = "fla gated_delta_rule"
LONG = (Tokens(16, 4096), Tokens(1, 65536))
SMALL = Tokens(2, 131)


@cache
def found(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def fla(rule: str, name: str) -> Call:
    """Its function of this name; inputs carry the names of its arguments."""

    def call(inputs: Tensors) -> Tensors:
        lift_refusal()
        return {"y": found(f"fla.ops.{rule}", name)(**inputs)[0]}

    return call


def naive(rule: str, name: str) -> Call:
    """Its own loop over tokens, which computes in fp32 whatever comes in."""
    return lambda inputs: {"y": found(f"fla.ops.{rule}.naive", name)(**inputs)[0]}


def refused_by_fla() -> str | None:
    """fla declines its gated backward kernel where Triton compiles it wrongly."""
    try:
        import triton
    except ImportError:
        return None  # the call will say so
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if hopper and (3, 4, 0) <= version < (3, 7, 1):
        return f"its gradients are wrong under Triton {triton.__version__} on Hopper (fla #640)"
    return None


@cache
def lift_refusal() -> None:
    """Let the kernel run all the same: its time is the yardstick, its numbers are not used."""
    if refused_by_fla():
        module: Any = importlib.import_module("fla.ops.common.chunk_o")
        module.TRITON_ABOVE_3_7_1 = True


def gated_delta(shape: Tokens, device: torch.device) -> Tensors:
    draw, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    beta = draw.gate(*rows).bfloat16()
    return learned(**pairs(draw, shape), g=draw.log_alpha(*rows), beta=beta)


def gated_linear(shape: Tokens, device: torch.device) -> Tensors:
    draw = Draw(device)
    gate = draw.log_alpha(shape.batch, shape.tokens, shape.heads)
    return learned(**pairs(draw, shape), g=gate)


def gated_per_feature(shape: Tokens, device: torch.device) -> Tensors:
    draw, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    beta, gate = draw.gate(*rows).bfloat16(), draw.log_alpha(*rows, shape.features)
    return learned(**pairs(draw, shape), g=gate, beta=beta)


def heads_first(shape: Tokens, device: torch.device) -> Tensors:
    """q, k, v [B, H, T, .]; queries long enough that the scores are not flat"""
    made = pairs(Draw(device), shape)
    made["q"] = 16 * made["q"]
    return learned(**{name: x.transpose(1, 2).contiguous() for name, x in made.items()})


def attention(inputs: Tensors) -> Tensors:
    q, k, v = inputs.values()
    return {"y": F.scaled_dot_product_attention(q, k, v, is_causal=True)}


def plain_attention(inputs: Tensors) -> Tensors:
    q, k, v = inputs.values()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return {"y": scores.masked_fill(later, -torch.inf).softmax(-1) @ v}


PEERS: tuple[Case, ...] = (
    Case(
        name=BASE,
        group="base",
        shapes=LONG,
        small=SMALL,
        draw=gated_delta,
        call=fla("gated_delta_rule", "chunk_gated_delta_rule"),
        truth=naive("gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        flops=delta_flops,
        bytes=partial(token_bytes, gates=4 + 2),
        caution=refused_by_fla,
        base=BASE,
        peer=True,
    ),
    Case(
        name="torch attention",
        group="attention",
        shapes=(Tokens(16, 4096, 16, 64, 64), Tokens(1, 65536, 16, 64, 64)),
        small=Tokens(2, 131, 16, 64, 64),
        draw=heads_first,
        call=attention,
        plain=plain_attention,
        truth=plain_attention,
        flops=attention_flops,
        bytes=partial(token_bytes, gates=0),
        base=BASE,
        peer=True,
    ),
    Case(
        name="fla simple_gla",
        group="fla",
        shapes=LONG,
        small=SMALL,
        draw=gated_linear,
        call=fla("simple_gla", "chunk_simple_gla"),
        truth=naive("simple_gla", "naive_recurrent_simple_gla"),
        flops=partial(linear_flops, dot=True),
        bytes=partial(token_bytes, gates=4),
        caution=refused_by_fla,
        base=BASE,
        peer=True,
    ),
    Case(
        name="fla kda",
        group="fla",
        shapes=LONG,
        small=SMALL,
        draw=gated_per_feature,
        call=fla("kda", "chunk_kda"),
        truth=naive("kda", "naive_recurrent_kda"),
        flops=delta_flops,
        bytes=partial(token_bytes, gates=4 * 128 + 2),
        base=BASE,
        peer=True,
    ),
)
