"""FLOPs and bytes by formula, per head and chunk, b = 64 tokens: what no kernel can do without.

FLOPs: matrix products, 2 per multiply-add, whole tiles (the masked half of b x b included); gates, masks
and all else that goes number by number are left out. Backward has two products for each of the forward
pass and computes none of them anew, except where the formula says so.
Bytes: every input and output once in the forward pass; in the backward pass inputs and the slope of the
output read, slopes of the inputs written. States at both ends of a sequence are left out (below 2 %), and
so is all that travels between kernels.
"""

import math

from benchmarks.kernel_bench.cases import Matrices, Passes, Tokens

CHUNK = 64


def passes(forward: float) -> Passes:
    return Passes(forward, 3 * forward)


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
