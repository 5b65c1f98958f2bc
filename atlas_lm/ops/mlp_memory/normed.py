"""An output norm, p = z + LN(o), o = W1 H: between what the last layer says and the slope that it gets.

    n = (o - mean o) r,  r = 1 / sqrt(var o + eps),   T g = r (g - mean g - n mean(g n)),   e = T g

with g = scale * (z + scale n + bias - v) for l2, -scale v for dot; means are over values, the rows of a tile.
"""

import triton
import triton.language as tl


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
def error_through_norm(
    cores, targets, norm, h, c, V: tl.constexpr, FEEDBACK: tl.constexpr, dtype: tl.constexpr
):
    """e of each tile. targets: o + z - v, or o - v for dot; norm: scale and bias, [H, V]"""
    scale = tl.load(norm[0] + h * V + c, mask=c < V, other=0.0)[:, None]
    bias = tl.load(norm[1] + h * V + c, mask=c < V, other=0.0)[:, None]
    found = ()
    for i in tl.static_range(len(cores)):
        normal, inverse = standard(cores[i], c, V)
        p = targets[i] - cores[i]
        if FEEDBACK:
            p += scale * normal + bias
        found = found + (through(scale * p, normal, inverse, c, V),)
    return found
