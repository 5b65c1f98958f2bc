"""Newton-Schulz on chip: X [o, i] with o <= i, zero-padded to [ROWS, COLS] or to tiles of COLS columns.

    forward    A = X X^T,  P = bA + cA^2,  X <- aX + PX
    backward   W = G X^T + X G^T,  Z = bW + c(WA + AW),  G <- aG + PG + ZX, G the gradient of X

Sums are fp32, operands of products have the dtype of the inputs. Each matrix lies densely in memory, by
rows of X or (TURNED) by its columns: offsets within it are compile-time constants, which keeps the
registers free for X.
"""

import triton
import triton.language as tl


@triton.jit
def offsets(rows, cols, O: tl.constexpr, I: tl.constexpr, TURNED: tl.constexpr):
    """Where the entries of X lie: [o, i] by rows, or turned, [i, o] by rows."""
    return cols * O + rows if TURNED else rows * I + cols


@triton.jit
def coefficients_of(coefficients, k):
    return (
        tl.load(coefficients + 3 * k),
        tl.load(coefficients + 3 * k + 1),
        tl.load(coefficients + 3 * k + 2),
    )


@triton.jit
def polynomial(gram, b, c, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """P = bA + cA^2 as an operand, from A [o, o] in fp32."""
    a = gram.to(DTYPE)
    return (b * gram + c * tl.dot(a, a, input_precision=PRECISION)).to(DTYPE)


@triton.jit
def gram_slope(half, gram, b, c, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """Z = bW + c(WA + AW) as an operand, from X G^T [o, o] in fp32 and A; W and A are symmetric."""
    w = half + tl.trans(half)
    wa = tl.dot(w.to(DTYPE), gram, input_precision=PRECISION)
    return (b * w + c * (wa + tl.trans(wa))).to(DTYPE)


@triton.jit
def norm_share(inner, norm, scale):
    """How much of S the gradient of |S|_F takes away: <G, S> scale^2 / |S|_F, nothing at zero."""
    return tl.where(norm > 0, inner * scale * scale / tl.where(norm > 0, norm, 1.0), 0.0)


@triton.jit(do_not_specialize=["steps"])
def forward_whole(
    matrix, out, coefficients, eps, steps,
    O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    S_TURNED: tl.constexpr, OUT_TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One matrix, X in registers over all steps: S is read once, X written once."""
    dtype: tl.constexpr = matrix.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (rows < O) & (cols < I)
    matrix += n * (O * I)
    s = tl.load(matrix + offsets(rows, cols, O, I, S_TURNED), mask=inside, other=0.0)
    s = s.to(tl.float32)
    x = s * (1.0 / (tl.sqrt_rn(tl.sum(s * s)) + eps))
    for k in range(steps):
        a, b, c = coefficients_of(coefficients, k)
        h = x.to(dtype)
        gram = tl.dot(h, tl.trans(h), input_precision=PRECISION)
        p = polynomial(gram, b, c, PRECISION, dtype)
        x = tl.dot(p, h, acc=a * x, input_precision=PRECISION)
    out += n * (O * I)
    tl.store(out + offsets(rows, cols, O, I, OUT_TURNED), x.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps"])
def forward_tiled(
    matrix, out, coefficients, eps, steps,
    O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    S_TURNED: tl.constexpr, OUT_TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One matrix whose X is too large for the registers: it lives in `out`, in the dtype of out."""
    dtype: tl.constexpr = matrix.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    matrix += n * (O * I)
    out += n * (O * I)
    square = 0.0
    for j in range(0, I, COLS):
        inside = (rows < O) & (cols + j < I)
        at = offsets(rows, cols + j, O, I, S_TURNED)
        s = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(s * s)
    scale = 1.0 / (tl.sqrt_rn(square) + eps)
    for j in range(0, I, COLS):
        inside = (rows < O) & (cols + j < I)
        at = offsets(rows, cols + j, O, I, S_TURNED)
        x = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(out + offsets(rows, cols + j, O, I, OUT_TURNED), x.to(dtype), mask=inside)
    for k in range(steps):
        tl.debug_barrier()  # tiles written above are read by other threads below
        a, b, c = coefficients_of(coefficients, k)
        gram = tl.zeros((ROWS, ROWS), tl.float32)
        for j in range(0, I, COLS):
            at = offsets(rows, cols + j, O, I, OUT_TURNED)
            h = tl.load(out + at, mask=(rows < O) & (cols + j < I), other=0.0)
            gram = tl.dot(h, tl.trans(h), acc=gram, input_precision=PRECISION)
        p = polynomial(gram, b, c, PRECISION, dtype)
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            at = offsets(rows, cols + j, O, I, OUT_TURNED)
            h = tl.load(out + at, mask=inside, other=0.0)
            x = tl.dot(p, h, acc=a * h.to(tl.float32), input_precision=PRECISION)
            tl.store(out + at, x.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps", "count"])
def backward_whole(
    matrix, dy, ds, xs, squares, gs, coefficients, eps, steps, count,
    O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    S_TURNED: tl.constexpr, DY_TURNED: tl.constexpr, OUT_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th matrix: all steps forward, X_k, A_k and P_k put aside, then back."""
    dtype: tl.constexpr = matrix.dtype.element_ty
    first = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (rows < O) & (cols < I)
    s_at = offsets(rows, cols, O, I, S_TURNED)
    x_at = rows * COLS + cols
    square_at = rows * ROWS + tl.arange(0, ROWS)[None, :]
    xs += first * steps * (ROWS * COLS)
    squares += first * steps * (2 * ROWS * ROWS)
    for n in range(first, count, tl.num_programs(0)):
        s = tl.load(matrix + n * (O * I) + s_at, mask=inside, other=0.0).to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(s * s))
        scale = 1.0 / (norm + eps)
        x = s * scale
        for k in range(steps):
            a, b, c = coefficients_of(coefficients, k)
            h = x.to(dtype)
            tl.store(xs + k * (ROWS * COLS) + x_at, h)
            gram = tl.dot(h, tl.trans(h), input_precision=PRECISION)
            tl.store(squares + 2 * k * (ROWS * ROWS) + square_at, gram.to(dtype))
            p = polynomial(gram, b, c, PRECISION, dtype)
            tl.store(squares + (2 * k + 1) * (ROWS * ROWS) + square_at, p)
            x = tl.dot(p, h, acc=a * x, input_precision=PRECISION)
        tl.debug_barrier()  # what was put aside is read by other threads
        dy_at = offsets(rows, cols, O, I, DY_TURNED)
        g = tl.load(dy + n * (O * I) + dy_at, mask=inside, other=0.0).to(tl.float32)
        for back in range(steps):
            k = steps - 1 - back
            a, b, c = coefficients_of(coefficients, k)
            x_k = tl.load(xs + k * (ROWS * COLS) + x_at)
            gram = tl.load(squares + 2 * k * (ROWS * ROWS) + square_at)
            p = tl.load(squares + (2 * k + 1) * (ROWS * ROWS) + square_at)
            h = g.to(dtype)
            half = tl.dot(x_k, tl.trans(h), input_precision=PRECISION)
            z = gram_slope(half, gram, b, c, PRECISION, dtype)
            g = tl.dot(p, h, acc=a * g, input_precision=PRECISION)
            g = tl.dot(z, x_k, acc=g, input_precision=PRECISION)
        tl.debug_barrier()  # the next matrix writes over it
        s = tl.load(matrix + n * (O * I) + s_at, mask=inside, other=0.0).to(tl.float32)
        g = scale * g - norm_share(tl.sum(g * s), norm, scale) * s
        out_at = offsets(rows, cols, O, I, OUT_TURNED)
        tl.store(ds + n * (O * I) + out_at, g.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["steps", "count"])
def backward_tiled(
    matrix, dy, ds, xs, squares, gs, coefficients, eps, steps, count,
    O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    S_TURNED: tl.constexpr, DY_TURNED: tl.constexpr, OUT_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same in tiles of columns: X_k [ROWS, WIDTH] and G (fp32) live in scratch."""
    dtype: tl.constexpr = matrix.dtype.element_ty
    WIDTH: tl.constexpr = (I + COLS - 1) // COLS * COLS
    first = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    at = rows * WIDTH + cols
    square_at = rows * ROWS + tl.arange(0, ROWS)[None, :]
    xs += first * steps * (ROWS * WIDTH)
    squares += first * steps * (2 * ROWS * ROWS)
    gs += first * (ROWS * WIDTH)
    for n in range(first, count, tl.num_programs(0)):
        square = 0.0
        for j in range(0, I, COLS):
            s_at = n * (O * I) + offsets(rows, cols + j, O, I, S_TURNED)
            s = tl.load(matrix + s_at, mask=(rows < O) & (cols + j < I), other=0.0).to(tl.float32)
            square += tl.sum(s * s)
        norm = tl.sqrt_rn(square)
        scale = 1.0 / (norm + eps)
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s_at = n * (O * I) + offsets(rows, cols + j, O, I, S_TURNED)
            s = tl.load(matrix + s_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(xs + j + at, (s * scale).to(dtype))
            dy_at = n * (O * I) + offsets(rows, cols + j, O, I, DY_TURNED)
            g = tl.load(dy + dy_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(gs + j + at, g)
        for k in range(steps):
            tl.debug_barrier()  # tiles written above are read by other threads below
            a, b, c = coefficients_of(coefficients, k)
            x_k = xs + k * (ROWS * WIDTH)
            gram = tl.zeros((ROWS, ROWS), tl.float32)
            for j in range(0, I, COLS):
                h = tl.load(x_k + j + at)
                gram = tl.dot(h, tl.trans(h), acc=gram, input_precision=PRECISION)
            tl.store(squares + 2 * k * (ROWS * ROWS) + square_at, gram.to(dtype))
            p = polynomial(gram, b, c, PRECISION, dtype)
            tl.store(squares + (2 * k + 1) * (ROWS * ROWS) + square_at, p)
            if k + 1 < steps:
                for j in range(0, I, COLS):
                    h = tl.load(x_k + j + at)
                    x = tl.dot(p, h, acc=a * h.to(tl.float32), input_precision=PRECISION)
                    tl.store(x_k + ROWS * WIDTH + j + at, x.to(dtype))
        for back in range(steps):
            tl.debug_barrier()
            k = steps - 1 - back
            a, b, c = coefficients_of(coefficients, k)
            x_k = xs + k * (ROWS * WIDTH)
            half = tl.zeros((ROWS, ROWS), tl.float32)
            for j in range(0, I, COLS):
                h = tl.load(gs + j + at).to(dtype)
                x = tl.load(x_k + j + at)
                half = tl.dot(x, tl.trans(h), acc=half, input_precision=PRECISION)
            gram = tl.load(squares + 2 * k * (ROWS * ROWS) + square_at)
            p = tl.load(squares + (2 * k + 1) * (ROWS * ROWS) + square_at)
            z = gram_slope(half, gram, b, c, PRECISION, dtype)
            for j in range(0, I, COLS):
                g = tl.load(gs + j + at)
                x = tl.load(x_k + j + at)
                g = tl.dot(p, g.to(dtype), acc=a * g, input_precision=PRECISION)
                g = tl.dot(z, x, acc=g, input_precision=PRECISION)
                tl.store(gs + j + at, g)
        tl.debug_barrier()
        inner = 0.0
        for j in range(0, I, COLS):
            s_at = n * (O * I) + offsets(rows, cols + j, O, I, S_TURNED)
            s = tl.load(matrix + s_at, mask=(rows < O) & (cols + j < I), other=0.0).to(tl.float32)
            inner += tl.sum(tl.load(gs + j + at) * s)
        share = norm_share(inner, norm, scale)
        for j in range(0, I, COLS):
            inside = (rows < O) & (cols + j < I)
            s_at = n * (O * I) + offsets(rows, cols + j, O, I, S_TURNED)
            s = tl.load(matrix + s_at, mask=inside, other=0.0).to(tl.float32)
            g = scale * tl.load(gs + j + at) - share * s
            out_at = n * (O * I) + offsets(rows, cols + j, O, I, OUT_TURNED)
            tl.store(ds + out_at, g.to(dtype), mask=inside)
        tl.debug_barrier()  # the next matrix writes over the scratch
