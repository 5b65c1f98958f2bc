"""One warp walks the tokens of one chunk and head; the row over the chunk's pairs stays in registers."""

import triton
import triton.language as tl


@triton.jit
def window_row(
    gamma, row, t, valid, columns, oldest,
    HALO: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """gamma of each column as token t sees it, and where in gamma it stands. row: (token row) * H + h"""
    age = t + HALO - columns
    inside = (age >= 0) & (age < C) & (columns - HALO >= oldest) & valid
    place = row * C + age
    if GATED:
        weight = tl.load(gamma + place, mask=inside, other=0.0)
    else:
        weight = tl.where(inside, 1.0, 0.0)
    return weight, place, inside


@triton.jit
def written(column, t, HALO: tl.constexpr):
    """Where row t of a chunk's weights is stored: up to the token's own pair, in eights, 32 bytes."""
    return column // 8 * 8 <= t + HALO


@triton.jit
def row_of(base, out, t, columns, HALO: tl.constexpr, N: tl.constexpr):
    """Row t of a chunk [CHUNK, N] as far as it is written; zero for a row before the first."""
    mask = written(columns, t, HALO) & (columns < N) & (t >= 0)
    return tl.load(base + (out + t) * N + columns, mask=mask, other=0.0)


@triton.jit
def weights_forward_kernel(
    eta, retain, theta, gamma,
    mix, keep, push, carry, momentum_mix,
    start, length, past, first_chunk, sequence,
    H: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    DECAYS: tl.constexpr, MOMENTUM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    left = tl.load(length + n) - t0
    if left <= 0:
        return
    oldest = -tl.load(past + n) - t0  # the first column that holds a pair, counted from the chunk
    row0 = (tl.load(start + n) + t0) * H + h
    out = (i * H + h) * CHUNK
    N: tl.constexpr = HALO + CHUNK
    columns = tl.arange(0, WIDTH)
    inner = columns < N
    m = tl.zeros([WIDTH], tl.float32)
    s = tl.zeros([WIDTH], tl.float32)
    a, p, c = 1.0, 0.0, 1.0
    for t in range(CHUNK):
        valid = t < left
        row = row0 + t * H
        step = tl.load(eta + row, mask=valid, other=0.0)
        alpha = 1.0
        if DECAYS:
            alpha = tl.load(retain + row, mask=valid, other=1.0)
        weight, _, _ = window_row(gamma, row, t, valid, columns, oldest, HALO, C, GATED)
        if MOMENTUM:
            momentum = tl.load(theta + row, mask=valid, other=1.0)
            s = momentum * s + step * weight
            c = momentum * c
            m = alpha * m + tl.where(valid, s, 0.0)
            p = alpha * p + tl.where(valid, c, 0.0)
            tl.store(push + out + t, p)
            tl.store(carry + out + t, c)
            tl.store(
                momentum_mix + (out + t) * N + columns, s, mask=inner & written(columns, t, HALO)
            )
        else:
            m = alpha * m + step * weight
        a = alpha * a
        tl.store(keep + out + t, a)
        tl.store(mix + (out + t) * N + columns, m, mask=inner & written(columns, t, HALO))


@triton.jit
def weights_backward_kernel(
    eta, retain, theta, gamma,
    mix, keep, push, carry, momentum_mix,
    dmix, dkeep, dpush, dtail_mix, dtail_keep,
    deta, dretain, dtheta, dgamma,
    start, length, past, first_chunk, sequence,
    H: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    DECAYS: tl.constexpr, MOMENTUM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The recurrence backwards: dm, ds, da, dp, dc are what later tokens ask of this token's row."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(sequence + i)
    t0 = (i - tl.load(first_chunk + n)) * CHUNK
    left = tl.load(length + n) - t0
    if left <= 0:
        return
    oldest = -tl.load(past + n) - t0
    row0 = (tl.load(start + n) + t0) * H + h
    out = (i * H + h) * CHUNK
    N: tl.constexpr = HALO + CHUNK
    columns = tl.arange(0, WIDTH)
    inner = columns < N
    dm = tl.zeros([WIDTH], tl.float32)
    ds = tl.zeros([WIDTH], tl.float32)
    da, dp, dc = 0.0, 0.0, 0.0
    if MOMENTUM:
        ds = tl.load(dtail_mix + (i * H + h) * N + columns, mask=inner, other=0.0)
        dc = tl.load(dtail_keep + i * H + h)
    drow = row_of(dmix, out, CHUNK - 1, columns, HALO, N)
    old = row_of(mix, out, CHUNK - 2, columns, HALO, N)
    olds = old
    if MOMENTUM:
        olds = row_of(momentum_mix, out, CHUNK - 2, columns, HALO, N)
    for back in range(CHUNK):
        t = CHUNK - 1 - back
        row = row0 + t * H
        valid, before = t < left, t > 0
        dm += drow
        # the rows of the next round are on their way while this one is reckoned
        drow = row_of(dmix, out, t - 1, columns, HALO, N)
        next_old = row_of(mix, out, t - 2, columns, HALO, N)
        next_olds = next_old
        if MOMENTUM:
            next_olds = row_of(momentum_mix, out, t - 2, columns, HALO, N)
        da += tl.load(dkeep + out + t)
        dalpha = tl.sum(dm * old) + da * tl.load(keep + out + t - 1, mask=before, other=1.0)
        dwrite = dm
        if MOMENTUM:
            dp += tl.load(dpush + out + t)
            dalpha += dp * tl.load(push + out + t - 1, mask=before, other=0.0)
            ds += tl.where(valid, dm, 0.0)
            dc += tl.where(valid, dp, 0.0)
            dmomentum = tl.sum(ds * olds) + dc * tl.load(
                carry + out + t - 1, mask=before, other=1.0
            )
            tl.store(dtheta + row, dmomentum, mask=valid)
            dwrite = ds
            momentum = tl.load(theta + row, mask=valid, other=1.0)
        weight, place, inside = window_row(gamma, row, t, valid, columns, oldest, HALO, C, GATED)
        step = tl.load(eta + row, mask=valid, other=0.0)
        tl.store(deta + row, tl.sum(dwrite * weight), mask=valid)
        if GATED:
            # absent pairs too: their gates get zero
            offered = (place >= row * C) & (place < row * C + C) & valid
            tl.store(dgamma + place, tl.where(inside, step * dwrite, 0.0), mask=offered)
        old, olds = next_old, next_olds
        if MOMENTUM:
            ds = momentum * ds
            dc = momentum * dc
        if DECAYS:
            tl.store(dretain + row, dalpha, mask=valid)
            alpha = tl.load(retain + row, mask=valid, other=1.0)
            dm, da, dp = alpha * dm, alpha * da, alpha * dp
