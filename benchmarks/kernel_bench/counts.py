"""FLOPs and bytes by formula, per head and chunk, b = 64 tokens: what no kernel can do without.

FLOPs: matrix products, 2 per multiply-add, whole tiles (the masked half of b x b included); gates, masks
and all else that goes number by number are left out. Backward has two products for each of the forward
pass and computes none of them anew, except where the formula says so.
Bytes: every input and output once in the forward pass; in the backward pass inputs and the slope of the
output read, slopes of the inputs written. States of matrix memories at both ends of a sequence are left out
(below 2 %), and so is all that travels between kernels.
"""

import math

from benchmarks.kernel_bench.cases import Matrices, Passes, Tokens

CHUNK = 64


def passes(forward: float) -> Passes:
    return Passes(forward, 3 * forward)


def total(*counts: Passes) -> Passes:
    return Passes(sum(c.forward for c in counts), sum(c.both for c in counts))


def chunks(shape: Tokens) -> int:
    """Over all sequences and heads, the last one of a sequence as long as it is."""
    return shape.batch * shape.heads * math.ceil(shape.tokens / CHUNK)


def linear_flops(
    shape: Tokens, *, window: int = 1, momentum: bool = False, dot: bool = False
) -> Passes:
    """A chunk sees n = b + c - 1 pairs. Scores b n F; read of the pairs b n V; read of the memory b F V and
    of the momentum another; errors n F V unless the objective is dot; the memory at the end n F V, the
    momentum another."""
    b, n, f, v = CHUNK, CHUNK + window - 1, shape.features, shape.values
    dense = 2 if momentum else 1
    products = b * n * (f + v) + dense * b * f * v + (not dot) * n * f * v + dense * n * f * v
    return passes(2 * products * chunks(shape))


def delta_flops(shape: Tokens, *, window: int = 1) -> Passes:
    """A tile has r = 64 unknown errors of b = 64 / c tokens, n = b + c - 1 pairs. Keys with keys n n F;
    forward substitution of r rows r r V / 2; scores b n F; read of the errors b r V; the memory asked for
    the pairs n F V, read b F V, and moved n F V."""
    r, f, v = CHUNK, shape.features, shape.values
    b = r // window
    n = b + window - 1
    products = n * n * f + r * r * v / 2 + b * n * f + b * r * v + (2 * n + b) * f * v
    tiles = shape.batch * shape.heads * math.ceil(shape.tokens / b)
    return passes(2 * products * tiles)


def mlp_flops(
    shape: Tokens,
    *,
    window: int = 1,
    momentum: bool = False,
    gated: bool = False,
    start: bool = False,
) -> Passes:
    """A memory of two layers with D units, g = 1 first layer, 2 with a gate; it moves with every token.

    A chunk sees n = b + c - 1 pairs. Their slopes: units g n F D, errors n D V, back to the units n V D. The
    memory at the end g n F D + n D V, the momentum another. Reads: of the memory g b F D + b D V, of the
    momentum another, of the start another; of the pairs, first layer b n F + g b n D, last b n D + b n V."""
    b, n = CHUNK, CHUNK + window - 1
    f, d, v, g = shape.features, shape.hidden, shape.values, 2 if gated else 1
    memory = g * f * d + d * v
    moved = (2 if momentum else 1) * n * memory
    dense = (1 + momentum + start) * b * memory
    of_pairs = b * n * (f + (g + 1) * d + v)
    slopes = n * (g * f * d + 2 * d * v)
    return passes(2 * (slopes + moved + dense + of_pairs) * chunks(shape))


def muon_flops(
    shape: Tokens,
    *,
    period: int,
    window: int = 1,
    gated: bool = False,
    start: bool = False,
    steps: int = 5,
) -> Passes:
    """A memory of two layers that jumps once in r tokens and else only fades.

    Slopes of n pairs as in `mlp_flops`; the momentum at the end of each period, from its r + c - 1 pairs;
    Newton-Schulz of each weight in every period. Reads: of the memory g b F D + b D V, of the start another.
    """
    n, jumps = CHUNK + window - 1, CHUNK // period
    f, d, v, g = shape.features, shape.hidden, shape.values, 2 if gated else 1
    memory = g * f * d + d * v
    moved = jumps * (period + window - 1) * memory
    dense = (1 + start) * CHUNK * memory
    slopes = n * (g * f * d + 2 * d * v)
    count = jumps * chunks(shape)
    return total(
        passes(2 * (slopes + moved + dense) * chunks(shape)),
        newton_schulz_flops(Matrices(g * count, d, f), steps=steps),
        newton_schulz_flops(Matrices(count, v, d), steps=steps),
    )


def attention_flops(shape: Tokens) -> Passes:
    """Scores and the values they weigh, T (T + 1) / 2 of each; the backward pass computes the scores anew,
    so 5 products against 2."""
    scores = shape.tokens * (shape.tokens + 1) / 2
    forward = 2 * shape.batch * shape.heads * scores * (shape.features + shape.values)
    return Passes(forward, 3.5 * forward)


def token_bytes(shape: Tokens, *, gates: int, element: int = 2) -> Passes:
    """q, k, v and y of `element` bytes a number, and so many bytes of gates per token and head."""
    rows = shape.count * shape.heads
    inputs = rows * (element * (2 * shape.features + shape.values) + gates)
    output = rows * element * shape.values
    return Passes(inputs + output, 3 * inputs + 2 * output)


def mlp_bytes(shape: Tokens, *, gates: int, momentum: bool = False, gated: bool = False) -> Passes:
    """Of the tokens, and of the states in fp32, which are large here: the memory read, memory, anchor and
    momentum at the end written; backward, the memory read and its slope written."""
    first = (2 if gated else 1) * shape.features
    one = 4 * shape.batch * shape.heads * shape.hidden * (first + shape.values)
    written = 2 + momentum
    return total(token_bytes(shape, gates=gates), Passes((1 + written) * one, (3 + written) * one))


def newton_schulz_flops(shape: Matrices, *, steps: int) -> Passes:
    """Per step, o the short side: X X^T o o i, its square o o o, their product with X o o i. Backward: the
    slopes of both symmetric products are symmetric, one product each; the last has two."""
    o, i = sorted((shape.rows, shape.columns))
    each = 2.0 * shape.number * steps
    forward = each * (2 * o * o * i + o * o * o)
    return Passes(forward, forward + each * (3 * o * o * i + o * o * o))


def matrix_bytes(shape: Matrices, *, element: int) -> Passes:
    """Forward: one read, one written; backward: the matrix and the slope read, a slope written."""
    one = element * shape.number * shape.rows * shape.columns
    return Passes(2 * one, 5 * one)
