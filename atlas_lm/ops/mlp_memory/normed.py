"""An output norm, p = z + LN(o), o = W1 H: between what the last layer says and the slope that it gets.

    n = (o - mean o) r,  r = 1 / sqrt(var o + eps),   T g = r (g - mean g - n mean(g n)),   e = T g

with g = scale * (z + scale n + bias - v) for l2, -scale v for dot; means are over values, the rows of a tile.
"""

import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import chunk_tiles, pair_tiles, pairs_there


@triton.jit
def standard(core, c, V: tl.constexpr):
    """n and r of each column"""
    EPS: tl.constexpr = 1e-6
    inside = (c < V)[:, None]
    mean = tl.sum(core, axis=0) / V
    centred = tl.where(inside, core - mean[None, :], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=0) / V + EPS)
    return centred * inverse[None, :], inverse


@triton.jit
def through(g, normal, inverse, c, V: tl.constexpr):
    """T g; T is symmetric"""
    mean, along = tl.sum(g, axis=0) / V, tl.sum(g * normal, axis=0) / V
    found = inverse[None, :] * (g - mean[None, :] - normal * along[None, :])
    return tl.where((c < V)[:, None], found, 0.0)


@triton.jit
def scale_and_bias(norm, h, c, V: tl.constexpr):
    """Of head h, [BV, 1] each"""
    scale = tl.load(norm[0] + h * V + c, mask=c < V, other=0.0)[:, None]
    return scale, tl.load(norm[1] + h * V + c, mask=c < V, other=0.0)[:, None]


@triton.jit
def error_through_norm(cores, targets, there, norm, h, c, V: tl.constexpr, FEEDBACK: tl.constexpr):
    """e of each tile, zero for pairs that are not there. targets: o + z - v, or o - v for dot"""
    scale, bias = scale_and_bias(norm, h, c, V)
    found = ()
    for i in tl.static_range(len(cores)):
        normal, inverse = standard(cores[i], c, V)
        p = targets[i] - cores[i]
        if FEEDBACK:
            p += scale * normal + bias
        p = tl.where(there[i][None, :], p, 0.0)
        found = found + (through(scale * p, normal, inverse, c, V),)
    return found


@triton.jit
def back_through_norm(
    derrors, cores, targets, there, norm, h, c, V: tl.constexpr, FEEDBACK: tl.constexpr
):
    """From what is asked of e, what is asked of o and of z (for dot, and turned round, of v), and sums over
    the pairs for scale and bias. targets: z - v, or -v for dot"""
    scale, bias = scale_and_bias(norm, h, c, V)
    inside = (c < V)[:, None]
    dcores, dtargets = (), ()
    dscale, dbias = tl.zeros([c.shape[0]], tl.float32), tl.zeros([c.shape[0]], tl.float32)
    for i in tl.static_range(len(derrors)):
        core, asked = cores[i].to(tl.float32), tl.where(there[i][None, :], derrors[i], 0.0)
        normal, inverse = standard(core, c, V)
        p = targets[i].to(tl.float32)
        if FEEDBACK:
            p += scale * normal + bias
        p = tl.where(inside & there[i][None, :], p, 0.0)
        g = scale * p
        dg = through(asked, normal, inverse, c, V)
        dp = scale * dg
        along = tl.sum(g * normal, axis=0) / V
        rest = tl.where(inside, g - (tl.sum(g, axis=0) / V)[None, :] - normal * along[None, :], 0.0)
        dinverse = tl.sum(asked * rest, axis=0)
        met = tl.sum(asked * normal, axis=0) / V
        dnormal = -inverse[None, :] * (along[None, :] * asked + met[None, :] * g)
        dscale += tl.sum(dg * p, axis=1)
        if FEEDBACK:
            dnormal += scale * dp
            dscale += tl.sum(dp * normal, axis=1)
            dbias += tl.sum(dp, axis=1)
        stretched = (dinverse * inverse * inverse / V)[None, :] * normal
        dcores = dcores + (through(dnormal, normal, inverse, c, V) - stretched,)
        dtargets = dtargets + (dp,)
    return dcores, dtargets, dscale, dbias


@triton.jit
def core_and_values(
    derrors, x, v, cores, norm, dnorm, slot, place, first, t0, bound, end, h, c,
    CHUNK: tl.constexpr, EDGE: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """What is asked of the last layer's output, and of values turned round; stores what is asked of the norm.

    cores: [NC, H, V, PAIRS], dnorm: [NC, H, 2, V], in tuples; empty without a norm, where both are derrors"""
    dcores, dtargets = derrors, derrors
    if len(norm) > 0:
        core = chunk_tiles(cores[0] + place * (V * (CHUNK + EDGE)), c, V, CHUNK, EDGE, BE)
        targets, values = (), pair_tiles(v, first, t0, bound, end, h, c, CHUNK, BE, H, V)
        for i in tl.static_range(len(values)):
            targets = targets + (-values[i].to(tl.float32),)
        if FEEDBACK:
            added, less_values, targets = (
                pair_tiles(x, first, t0, bound, end, h, c, CHUNK, BE, H, F),
                targets,
                (),
            )
            for i in tl.static_range(len(values)):
                targets = targets + (less_values[i] + added[i],)
        there = pairs_there(t0, bound, end, CHUNK, BE)
        dcores, dtargets, dscale, dbias = back_through_norm(
            derrors, core, targets, there, norm, h, c, V, FEEDBACK
        )
        at = dnorm[0] + place * (2 * V) + c
        tl.store(at, dscale, mask=(c < V) & (slot == 0))
        tl.store(at + V, dbias, mask=(c < V) & (slot == 0))
    return dcores, dtargets
