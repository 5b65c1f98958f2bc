"""A step of a two-layer memory, gated or not: one program per row and head.

Hidden units stand in registers as a whole. The first weights are walked in tiles of features, the last
in tiles of values, so that a tile of the anchor serves its error and the way back at once, and every
weight is read once: anchor up, anchor down, then memory and momentum up, and down for the read.
"""

import triton
import triton.language as tl

from atlas_lm.ops.memory_step.pieces import (
    activate,
    advance,
    clip,
    derivative,
    move,
    outer,
    pair_gate,
    pair_weights,
    point,
    times,
)


@triton.jit
def mlp_step(
    memory, anchor, momentum, start, memory_out, anchor_out, momentum_out,
    window, window_out, token, position, position_out, y,
    HEADS: tl.constexpr, K: tl.constexpr, F: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, TILE_F: tl.constexpr,
    TILE_V: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, OBJECTIVE: tl.constexpr,
    DELTA: tl.constexpr, GAMMA: tl.constexpr, RETENTION: tl.constexpr, SKIP: tl.constexpr,
    AFTER: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w0 and gate are [B, H, D, F], w1 [B, H, V, D], y [B, H, V]; HIDDEN and C are D and c, padded."""
    n = tl.program_id(0).to(tl.int64)
    row, head = n // HEADS, n % HEADS
    now = tl.load(position + row)
    live = now >= 0 if token.valid is None else tl.load(token.valid + row) != 0
    border = (now % CHUNK == 0) & live
    write = border | (not SHARED)
    alpha = 1.0 if RETENTION == "keep" else tl.exp(tl.load(token.log_alpha + n))
    theta = 0.0 if momentum[0] is None else tl.load(token.theta + n)

    j, unit, rest = tl.arange(0, C)[None, :], tl.arange(0, HIDDEN), tl.arange(0, TILE_F)
    part = tl.arange(0, TILE_V)[:, None]
    features = token.x + n * (SIZE + 1) * F
    up, down = n * D * F, n * V * D

    # predict: the hidden units of the window's pairs, [HIDDEN, C]
    a = tl.zeros((HIDDEN, C), tl.float32)
    g = tl.zeros((HIDDEN, C), tl.float32)
    for first in range(0, F, TILE_F):
        f = first + rest
        x = tl.load(features + j * F + f[:, None], mask=(j < SIZE) & (f[:, None] < F), other=0.0)
        tile = unit[:, None] * F + f[None, :]
        mask = (unit[:, None] < D) & (f[None, :] < F)
        w = point(memory[0], anchor[0], start[0], anchor_out[0], up + tile, head * D * F + tile,
                  mask, border, write, alpha, AFTER, RETENTION)  # fmt: skip
        a += times(w, x, PRECISION)
        if GATED:
            w = point(memory[2], anchor[2], start[2], anchor_out[2], up + tile, head * D * F + tile,
                      mask, border, write, alpha, AFTER, RETENTION)  # fmt: skip
            g += times(w, x, PRECISION)
    s = activate(a, ACTIVATION)
    h = s * g if GATED else s

    # slope: errors [TILE_V, C] by tile of values, and their way back to the hidden units
    u = tl.zeros((HIDDEN, C), tl.float32)
    square = tl.zeros((1, C), tl.float32)
    errors = ()
    for i in tl.static_range(tl.cdiv(V, TILE_V)):
        v = i * TILE_V + part
        tile = v * D + unit[None, :]
        mask = (v < V) & (unit[None, :] < D)
        w = point(memory[1], anchor[1], start[1], anchor_out[1], down + tile, head * V * D + tile,
                  mask, border, write, alpha, AFTER, RETENTION)  # fmt: skip
        old = tl.load(
            window.v + n * (SIZE - 1) * V + j * V + v, mask=(j < SIZE - 1) & (v < V), other=0.0
        )
        newest = tl.load(token.v + n * V + v, mask=v < V, other=0.0)
        error = -tl.where(j == SIZE - 1, newest, old)
        if OBJECTIVE != "dot":
            error += times(w, h, PRECISION)
            if SKIP:
                error += tl.load(features + j * F + v, mask=(j < SIZE) & (v < V), other=0.0)
        if OBJECTIVE == "huber":
            square += tl.sum(error * error, axis=0, keep_dims=True)
        u += times(tl.trans(w), error, PRECISION)
        errors = errors + (error,)  # noqa: RUF005, a tuple of tiles grows by addition alone
    weight = pair_weights(token, window, n, now, SIZE, C, GAMMA)
    if OBJECTIVE == "huber":
        delta = pair_gate(window.delta, token.delta, n, SIZE, C) if DELTA is None else DELTA
        weight = weight * clip(square, delta)
    u = u * weight
    slope_gate = u * s
    u = u * derivative(a, ACTIVATION)
    if GATED:
        u = u * g

    # step and read, first the way up, [HIDDEN, 1]
    a = tl.zeros((HIDDEN, 1), tl.float32)
    g = tl.zeros((HIDDEN, 1), tl.float32)
    for first in range(0, F, TILE_F):
        f = first + rest
        x = tl.load(features + j * F + f[:, None], mask=(j < SIZE) & (f[:, None] < F), other=0.0)
        q = tl.load(features + SIZE * F + f[None, :], mask=f[None, :] < F, other=0.0)
        tile = unit[:, None] * F + f[None, :]
        mask = (unit[:, None] < D) & (f[None, :] < F)
        w = move(memory[0], momentum[0], start[0], memory_out[0], momentum_out[0], up + tile,
                 head * D * F + tile, mask, outer(u, x, PRECISION), alpha, theta, live, RETENTION)  # fmt: skip
        a += tl.sum(w * q, axis=1, keep_dims=True)
        if GATED:
            w = move(memory[2], momentum[2], start[2], memory_out[2], momentum_out[2], up + tile,
                     head * D * F + tile, mask, outer(slope_gate, x, PRECISION), alpha, theta, live, RETENTION)  # fmt: skip  # noqa: E501
            g += tl.sum(w * q, axis=1, keep_dims=True)
    read = activate(a, ACTIVATION)
    read = tl.trans(read * g if GATED else read)

    # then down
    for i in tl.static_range(tl.cdiv(V, TILE_V)):
        v = i * TILE_V + part
        tile = v * D + unit[None, :]
        mask = (v < V) & (unit[None, :] < D)
        w = move(memory[1], momentum[1], start[1], memory_out[1], momentum_out[1], down + tile,
                 head * V * D + tile, mask, outer(errors[i] * weight, h, PRECISION), alpha, theta, live,
                 RETENTION)  # fmt: skip
        result = tl.sum(w * read, axis=1, keep_dims=True)
        if SKIP:
            result += tl.load(features + SIZE * F + v, mask=v < V, other=0.0)
        tl.store(y + n * V + v, tl.where(live, result, 0.0), mask=v < V)
    advance(token, window, window_out, position_out, n, row, head, now, live, SIZE, K, V)
