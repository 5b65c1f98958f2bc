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
    pair_values,
    pair_weights,
    point,
    times,
    times_long,
)


@triton.jit
def mlp_step(
    memory, anchor, momentum, start, memory_out, anchor_out, momentum_out,
    window, window_out, token, position, position_out, y, scratch,
    HEADS: tl.constexpr, K: tl.constexpr, F: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, POINT_F: tl.constexpr,
    POINT_V: tl.constexpr, STEP_F: tl.constexpr, STEP_V: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, OBJECTIVE: tl.constexpr, DELTA: tl.constexpr, GAMMA: tl.constexpr,
    RETENTION: tl.constexpr, SKIP: tl.constexpr, AFTER: tl.constexpr, CHUNK: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w0 and gate are [B, H, D, F], w1 [B, H, V, D], y [B, H, V]; HIDDEN and C are D and c, padded.

    scratch: [B, H, c, V], where the errors wait between the two passes over w1
    POINT, STEP: widths of the tiles in which slopes are taken, and weights moved
    """
    n = tl.program_id(0).to(tl.int64)
    row, head = n // HEADS, n % HEADS
    now = tl.load(position + row)
    live = now >= 0 if token.valid is None else tl.load(token.valid + row) != 0
    border = (now % CHUNK == 0) & live
    write = border | (not SHARED)
    alpha = 1.0 if RETENTION == "keep" else tl.exp(tl.load(token.log_alpha + n))
    theta = 0.0 if momentum[0] is None else tl.load(token.theta + n)

    # masks that hold everywhere are known to the compiler, and cost nothing
    j, unit = tl.arange(0, C)[None, :], tl.arange(0, HIDDEN)
    units = (unit < D) | (D == HIDDEN)
    features, keys = token.x + n * (SIZE + 1) * F, (j < SIZE) | (SIZE == C)
    errors = scratch + n * SIZE * V
    up, up_start = n * D * F, head * D * F
    down, down_start = n * V * D, head * V * D

    # predict: the hidden units of the window's pairs, [HIDDEN, C]
    a = tl.zeros((HIDDEN, C), tl.float32)
    g = tl.zeros((HIDDEN, C), tl.float32)
    for first in range(0, F, POINT_F):
        f = first + tl.arange(0, POINT_F)
        inside = (f < F) | (F % POINT_F == 0)
        x = tl.load(features + j * F + f[:, None], mask=keys & inside[:, None], other=0.0)
        at0, mask0 = unit[:, None] * F + f[None, :], units[:, None] & inside[None, :]
        w0 = point(memory[0], anchor[0], start[0], anchor_out[0], up, up_start, at0, mask0,
                   border, write, alpha, AFTER, RETENTION)  # fmt: skip
        a += times(w0, x, PRECISION)
        if GATED:
            w0 = point(memory[2], anchor[2], start[2], anchor_out[2], up, up_start, at0, mask0,
                       border, write, alpha, AFTER, RETENTION)  # fmt: skip
            g += times(w0, x, PRECISION)
    s = activate(a, ACTIVATION)
    h = s * g if GATED else s

    # slope: errors [POINT_V, C] by tile of values, and their way back to the hidden units
    u = tl.zeros((HIDDEN, C), tl.float32)
    square = tl.zeros((1, C), tl.float32)
    for first in range(0, V, POINT_V):
        v = first + tl.arange(0, POINT_V)[:, None]
        values = (v < V) | (V % POINT_V == 0)
        at1, mask1 = v * D + unit[None, :], values & units[None, :]
        w1 = point(memory[1], anchor[1], start[1], anchor_out[1], down, down_start, at1, mask1,
                   border, write, alpha, AFTER, RETENTION)  # fmt: skip
        error = -pair_values(token, window, n, v, j, SIZE, V)
        if OBJECTIVE != "dot":
            error += times_long(w1, h, PRECISION)
            if SKIP:
                error += tl.load(features + j * F + v, mask=keys & values, other=0.0)
        if OBJECTIVE == "huber":
            square += tl.sum(error * error, axis=0, keep_dims=True)
        u += times(tl.trans(w1), error, PRECISION)
        tl.store(errors + j * V + v, error, mask=keys & values)
    tl.debug_barrier()  # errors come back to other threads than those that stored them
    weight = pair_weights(token, window, n, now, SIZE, C, GAMMA)
    if OBJECTIVE == "huber":
        delta = pair_gate(window.delta, token.delta, n, SIZE, C) if DELTA is None else DELTA
        weight = weight * clip(square, delta)
    u = u * weight
    slope_gate = u * s
    slope = u * derivative(a, ACTIVATION)
    if GATED:
        slope = slope * g

    # step and read, first the way up, [HIDDEN, 1]
    b = tl.zeros((HIDDEN, 1), tl.float32)
    e = tl.zeros((HIDDEN, 1), tl.float32)
    for first in range(0, F, STEP_F):
        f = first + tl.arange(0, STEP_F)
        inside = (f < F) | (F % STEP_F == 0)
        x = tl.load(features + j * F + f[:, None], mask=keys & inside[:, None], other=0.0)
        q = tl.load(features + SIZE * F + f[None, :], mask=inside[None, :], other=0.0)
        at0, mask0 = unit[:, None] * F + f[None, :], units[:, None] & inside[None, :]
        w0 = move(memory[0], momentum[0], start[0], memory_out[0], momentum_out[0], up,
                  up_start, at0, mask0, outer(slope, x, PRECISION), alpha, theta, live,
                  RETENTION)  # fmt: skip
        b += tl.sum(w0 * q, axis=1, keep_dims=True)
        if GATED:
            w0 = move(memory[2], momentum[2], start[2], memory_out[2], momentum_out[2], up,
                      up_start, at0, mask0, outer(slope_gate, x, PRECISION), alpha, theta, live,
                      RETENTION)  # fmt: skip
            e += tl.sum(w0 * q, axis=1, keep_dims=True)
    b = activate(b, ACTIVATION)
    hidden = tl.trans(b * e if GATED else b)

    # then down
    for first in range(0, V, STEP_V):
        v = first + tl.arange(0, STEP_V)[:, None]
        values = (v < V) | (V % STEP_V == 0)
        at1, mask1 = v * D + unit[None, :], values & units[None, :]
        error = weight * tl.load(errors + j * V + v, mask=keys & values, other=0.0)
        w1 = move(memory[1], momentum[1], start[1], memory_out[1], momentum_out[1], down,
                  down_start, at1, mask1, outer(error, h, PRECISION), alpha, theta, live,
                  RETENTION)  # fmt: skip
        read = tl.sum(w1 * hidden, axis=1, keep_dims=True)
        if SKIP:
            read += tl.load(features + SIZE * F + v, mask=values, other=0.0)
        tl.store(y + n * V + v, tl.where(live, read, 0.0), mask=values)
    advance(token, window, window_out, position_out, n, row, head, now, live, SIZE, K, V)
