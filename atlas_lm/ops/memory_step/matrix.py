"""A step of a matrix memory: one program per row, head and block of values."""

import triton
import triton.language as tl

from atlas_lm.ops.memory_step.pieces import (
    advance,
    move,
    outer,
    pair_values,
    pair_weights,
    point,
    times_long,
)


@triton.jit
def matrix_step(
    memory, anchor, momentum, start, memory_out, anchor_out, momentum_out,
    window, window_out, token, position, position_out, y,
    HEADS: tl.constexpr, K: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    SIZE: tl.constexpr, C: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr,
    OBJECTIVE: tl.constexpr, GAMMA: tl.constexpr, RETENTION: tl.constexpr, SKIP: tl.constexpr,
    AFTER: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and outputs are [B, H, V, F] and [B, H, V]; FEATURES and C are F and c, padded."""
    n = tl.program_id(0).to(tl.int64)
    row, head = n // HEADS, n % HEADS
    now = tl.load(position + row)
    live = now >= 0 if token.valid is None else tl.load(token.valid + row) != 0
    border = (now % CHUNK == 0) & live
    alpha = 1.0 if RETENTION == "keep" else tl.exp(tl.load(token.log_alpha + n))
    theta = 0.0 if momentum is None else tl.load(token.theta + n)

    v = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    f, j = tl.arange(0, FEATURES), tl.arange(0, C)[None, :]
    values, inside = (v < V) | (V % TILE == 0), (f < F) | (F == FEATURES)
    keys, mask = (j < SIZE) | (SIZE == C), values & inside[None, :]
    base, first, at = n * V * F, head * V * F, v * F + f[None, :]
    features = token.x + n * (SIZE + 1) * F
    x = tl.load(features + j * F + f[:, None], mask=keys & inside[:, None], other=0.0)
    q = tl.load(features + SIZE * F + f[None, :], mask=inside[None, :], other=0.0)

    # slopes of the window's pairs, [TILE, C]
    error = -pair_values(token, window, n, v, j, SIZE, V)
    write = border | (not SHARED)
    if OBJECTIVE == "l2" or anchor is not None:  # an anchor is carried on, even where none reads it
        w = point(
            memory,
            anchor,
            start,
            anchor_out,
            base,
            first,
            at,
            mask,
            border,
            write,
            alpha,
            AFTER,
            RETENTION,
        )
        if OBJECTIVE == "l2":
            error += times_long(w, x, PRECISION)
            if SKIP:
                error += tl.load(features + j * F + v, mask=keys & values, other=0.0)
    error = error * pair_weights(token, window, n, now, SIZE, C, GAMMA)

    # step and read
    w = move(
        memory, momentum, start, memory_out, momentum_out, base, first, at, mask,
        outer(error, x, PRECISION), alpha, theta, live, RETENTION,
    )  # fmt: skip
    read = tl.sum(w * q, axis=1, keep_dims=True)
    if SKIP:
        read += tl.load(features + SIZE * F + v, mask=values, other=0.0)
    tl.store(y + n * V + v, tl.where(live, read, 0.0), mask=values)
    if tl.program_id(1) == 0:
        advance(token, window, window_out, position_out, n, row, head, now, live, SIZE, K, V)
