"""Rows in the manner of LaCT: a SwiGLU memory that is written once in 2048 tokens (arXiv 2505.23884).

Its equations, written anew in plain PyTorch; what it does with a chunk goes through torch.compile, as theirs
does. A chunk is read before it is written, the last one is not written. Newton-Schulz has other coefficients
there, as many steps.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernel_bench.cases import Call, Case, Matrices, Passes, Tensors, Tokens
from benchmarks.kernel_bench.counts import newton_schulz_flops, passes, token_bytes, total
from benchmarks.kernel_bench.inputs import Draw, learned, pairs, two_layers
from benchmarks.kernel_bench.peers import BASE, found

CHUNK, STEPS = 2048, 5
SIZES = dict(heads=4, features=256, values=256, hidden=256)
Weights = tuple[Tensor, Tensor, Tensor]  # w0 [.., D, F], w1 [.., V, D], gate [.., D, F]


def read(weights: Weights, q: Tensor) -> Tensor:
    """W1 (silu(W0 q) * Wg q). q: [B, H, n, F]"""
    w0, w1, gate = (w.to(q.dtype) for w in weights)
    return (F.silu(q @ w0.mT) * (q @ gate.mT)) @ w1.mT


def slopes(weights: Weights, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of <W(k), v> in each weight, as factors: left^T right."""
    w0, w1, gate = (w.to(k.dtype) for w in weights)
    a, g, u = k @ w0.mT, k @ gate.mT, v @ w1
    s = torch.sigmoid(a)
    return [(u * g * s * (1 + a * (1 - s)), k), (v, a * s * g), (u * a * s, k)]


def write(
    weights: Weights,
    momentum: Weights,
    lengths: Weights,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    theta: Tensor,
    *,
    muon: bool,
) -> tuple[Weights, Weights]:
    """S = mean(theta) S + sum_t eta_t slope_t; W = W + S or W + NS(S), rows back to their first lengths.

    eta: [B, H, n, 3], a step for each weight   theta: [B, H, n]
    """
    keep = theta.mean(-1)[..., None, None]
    pushed, moved = [], []
    for i, (left, right) in enumerate(slopes(weights, k, v)):
        asked = left.mT @ (right * eta[..., i : i + 1]).to(right.dtype)
        s = keep * momentum[i] + asked
        step = orthogonal(s.to(k.dtype)) if muon else s
        w = weights[i] + step
        moved.append(lengths[i] * w / (w.norm(dim=-1, keepdim=True) + 1e-5))
        pushed.append(s)
    return tuple(moved), tuple(pushed)  # type: ignore[return-value]


def orthogonal(s: Tensor) -> Tensor:
    return found("atlas_lm.ops.newton_schulz", "newton_schulz_parallel")(s, STEPS)


def run(
    inputs: Tensors,
    *,
    muon: bool,
    chunk: int = CHUNK,
    read: Callable[..., Any] = read,
    write: Callable[..., Any] = write,
) -> Tensors:
    """y [B, T, H, V], and the memory after the last chunk that was written."""
    q, k, v, eta, theta = (
        inputs[n].transpose(1, 2).contiguous() for n in ("q", "k", "v", "eta", "theta")
    )
    first = [inputs[f"memory.{n}"] for n in ("w0", "w1", "gate")]
    weights = tuple(w.expand(q.shape[0], *w.shape).contiguous() for w in first)
    lengths = tuple(w.norm(dim=-1, keepdim=True) for w in weights)
    momentum = tuple(map(torch.zeros_like, weights))
    found_reads = []
    pieces = zip(*(x.split(chunk, dim=2) for x in (q, k, v, eta, theta)), strict=True)
    for asked, *written in pieces:
        found_reads.append(read(weights, asked))
        if len(found_reads) * chunk < q.shape[2]:
            weights, momentum = write(weights, momentum, lengths, *written, muon=muon)
    y = torch.cat(found_reads, dim=2).transpose(1, 2)
    return {"y": y, "end w0": weights[0], "end w1": weights[1], "end gate": weights[2]}


@cache
def compiled_parts() -> dict[str, Callable[..., Any]]:
    return {part.__name__: torch.compile(part, dynamic=False) for part in (read, write)}


def compiled(muon: bool) -> Call:
    return lambda inputs: run(inputs, muon=muon, **compiled_parts())


def let_go() -> None:
    compiled_parts.cache_clear()
    torch.compiler.reset()


def draw(shape: Tokens, device: torch.device) -> Tensors:
    make, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    gates = dict(eta=0.01 * make.gate(*rows, 3), theta=make.gate(*rows, shift=2.2))
    weights = two_layers(make, "memory", (shape.heads,), shape, gated=True)
    return learned(**pairs(make, shape), **gates, **weights)


def flops(shape: Tokens, *, muon: bool, chunk: int = CHUNK) -> Passes:
    """Reads of all tokens 2 F D + D V; of those that are written the units 2 F D, back to them D V, and the
    momentum 2 F D + D V; Newton-Schulz of three weights in every chunk that is written."""
    f, d, v = shape.features, shape.hidden, shape.values
    rows = shape.batch * shape.heads
    times = math.ceil(shape.tokens / chunk) - 1
    reads = shape.tokens * (2 * f * d + d * v)
    writes = times * chunk * (4 * f * d + 2 * d * v)
    steps = STEPS if muon else 0
    return total(
        passes(2 * rows * (reads + writes)),
        newton_schulz_flops(Matrices(2 * rows * times, d, f), steps=steps),
        newton_schulz_flops(Matrices(rows * times, v, d), steps=steps),
    )


def lact_case(name: str, *, muon: bool) -> Case:
    plain = partial(run, muon=muon)
    return Case(
        name=name,
        group="deep_peers",
        shapes=(Tokens(16, 4096, **SIZES), Tokens(1, 65536, **SIZES)),
        small=Tokens(2, 2 * CHUNK + 70, heads=2, features=64, values=64, hidden=64),
        draw=draw,
        call=compiled(muon),
        plain=plain,
        truth=plain,
        flops=partial(flops, muon=muon),
        bytes=partial(token_bytes, gates=4 * 4),
        base=BASE,
        release=let_go,
        peer=True,
    )


LACT: tuple[Case, ...] = (
    lact_case("LaCT-like", muon=False),
    lact_case("LaCT-like + muon", muon=True),
)
