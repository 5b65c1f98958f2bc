"""The emulator computes what Triton's kernels mean, and sees faults that are planted into them."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="what is emulated is what Triton compiles")
import triton
import triton.language as tl

from atlas_lm.ops.mlp_memory.pieces import collect, post, turn_of
from tests.hopper.driver import emulated
from tests.hopper.machine import Fault, Order
from tests.hopper.orders import EARLY, LATE, in_all_orders


@triton.jit
def product_kernel(
    a, b, c, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TURNED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C [M, N] = A B (TURNED: A [K, M] is read as its transpose; SCALED: A passes through registers)."""
    row, column, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        inside = (first + k < K)[:, None]
        right = tl.load(
            b + (first + k)[:, None] * N + column, mask=inside & (column < N), other=0.0
        )
        if TURNED:
            left = tl.load(a + (first + k)[:, None] * M + row, mask=inside & (row < M), other=0.0)
            left = tl.trans(left)
        else:
            here = (row < M)[:, None] & (first + k < K)[None, :]
            left = tl.load(a + row[:, None] * K + (first + k)[None, :], mask=here, other=0.0)
        if SCALED:
            left = (left * 0.5).to(right.dtype)
        total += tl.dot(left, right, input_precision=PRECISION)
    tl.store(c + row[:, None] * N + column, total, mask=(row < M)[:, None] & (column < N))


def product(
    left, right, *, turned=False, scaled=False, precision="tf32", warps=4, stages=2, **tile
):
    tile = dict(BM=64, BN=64, BK=32) | tile
    rows = left.shape[1] if turned else left.shape[0]
    out = torch.full((rows, right.shape[1]), float("nan"))
    product_kernel[(triton.cdiv(rows, tile["BM"]),)](
        left, right, out, rows, right.shape[1], right.shape[0], **tile,
        TURNED=turned, SCALED=scaled, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def drawn(rows, depth, columns, dtype=torch.bfloat16, turned=False):
    torch.manual_seed(0)
    left, right = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
    return (left.T.contiguous() if turned else left), right


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, dict(turned=True, BK=64)),
        (torch.bfloat16, dict(scaled=True, BN=128, BK=16)),
        (torch.bfloat16, dict(warps=8, BM=128, stages=3)),
        (torch.bfloat16, dict(warps=2, stages=1)),
        (torch.bfloat16, dict(BM=16, BN=32)),
        (torch.float16, dict(BN=16)),
        (torch.float32, dict(precision="tf32")),
        (torch.float32, dict(precision="tf32x3", warps=2)),
        (torch.float32, dict(precision="ieee", BM=16, BN=16, BK=16)),
    ],
    ids=str,
)
def test_products(dtype, options):
    """Through every way in which tiles lie in shared memory and registers, sizes that fill no tile."""
    turned, scaled = options.get("turned", False), options.get("scaled", False)
    left, right = drawn(100, 90, options.get("BN", 64) - 3, dtype, turned)
    got = in_all_orders(lambda: {"c": product(left, right, **options)})["c"]
    exact = (left.T if turned else left).double() @ right.double() * (0.5 if scaled else 1)
    loose = 1e-3 if options.get("precision") == "tf32" and dtype == torch.float32 else 2e-6
    assert ((got - exact).norm() / exact.norm()).item() < loose


@triton.jit
def numbers_kernel(x, n, out, SIZE: tl.constexpr):
    """Integers, floats, sums over a warp and over a block."""
    i = tl.arange(0, SIZE)
    a, m = tl.load(x + i), tl.load(n + i)
    tl.store(out + i, tl.exp(a) + tl.sqrt(tl.abs(a)) / 3 - tl.log(a * a + 1))
    tl.store(out + SIZE + i, (m // 7 * 3 + m % 5 - (m >> 2) + (m ^ 21)).to(tl.float32))
    tl.store(out + 2 * SIZE + i, tl.where(m % 2 == 0, tl.maximum(a, 0.5), tl.sigmoid(a)))
    tl.store(out + 3 * SIZE + i, a.to(tl.bfloat16).to(tl.float32) + tl.sum(a) - tl.max(a))
    tl.store(out + 4 * SIZE + i, tl.cumsum(a.to(tl.float16).to(tl.float32)))


def test_numbers():
    torch.manual_seed(1)
    x, n = torch.randn(256), torch.arange(256, dtype=torch.int32)

    def run():
        out = torch.empty(5, 256)
        numbers_kernel[(1,)](x, n, out, SIZE=256)
        return {"out": out}

    got = in_all_orders(run)["out"]
    wanted = torch.stack(
        [
            x.exp() + x.abs().sqrt() / 3 - (x * x + 1).log(),
            (n // 7 * 3 + n % 5 - (n >> 2) + (n ^ 21)).float(),
            torch.where(n % 2 == 0, x.clamp_min(0.5), x.sigmoid()),
            x.bfloat16().float() + x.sum() - x.max(),
            x.half().float().cumsum(0),
        ]
    )
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def without(word):
    return lambda text: re.sub(rf"^\s*{word}[^;]*;", "", text, flags=re.M)


def instead(word, other):
    return lambda text: re.sub(word, other, text)


FAULTS = {
    "barriers": without(r"bar\.sync"),
    "waits for copies": without(r"cp\.async\.wait_group"),
    "fences": without(r"fence\.proxy\.async"),
    "waits for products": instead(r"(wgmma\.wait_group\.sync\.aligned)\s+\d+", r"\1 7"),
    "commits of products": without(r"wgmma\.commit_group"),
    "an address": instead(r"(st\.global\.\S+ \[ %rd\d+ \+) 0", r"\1 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault):
    """A fault, or results that are wrong or depend on the order of warps, copies and products."""
    left, right = drawn(64, 128, 64)
    options = dict(scaled=fault == "fences", stages=1 if fault == "fences" else 2)
    with emulated(LATE):
        wanted = product(left, right, **options)
    right_in_all = True
    for order in (EARLY, LATE, Order("random", late=True, seed=1)):
        try:
            with emulated(order, FAULTS[fault]):
                right_in_all &= torch.equal(product(left, right, **options), wanted)
        except Fault:
            right_in_all = False
    assert not right_in_all


@triton.jit
def hand_over_kernel(x, out, mail, arrived, turn, SLICES: tl.constexpr):
    """Programs of a group add up their rows, twice."""
    slot, group = turn_of(turn, SLICES)
    c, t = tl.arange(0, 16), tl.arange(0, 16)
    at = c[:, None] * 16 + t[None, :]
    part = (tl.load(x + (group * SLICES + slot) * 256 + at),)
    for k in range(2):
        post(part, mail, arrived, group, slot, k, c, SLICES, 16, 0)
        part = collect(part, mail, arrived, group, k, c, SLICES, 16, 0)
    tl.store(out + (group * SLICES + slot) * 256 + at, part[0])


def handed_over(groups=4, slices=3):
    x = torch.randn(groups, slices, 16, 16, generator=torch.Generator().manual_seed(0))
    out, mail = torch.empty_like(x), torch.full((groups * 2 * slices * 256,), torch.nan)
    counts = torch.zeros(groups + 1, dtype=torch.int32)
    hand_over_kernel[(groups * slices,)](x, out, mail, counts[1:], counts[:1], SLICES=slices)
    return {"out": out, "wanted": slices * x.sum(1, keepdim=True).expand_as(x)}


def test_programs_wait_for_each_other():
    """More of them than run side by side, begun in either order."""
    got = in_all_orders(handed_over)
    torch.testing.assert_close(got["out"], got["wanted"])


def test_programs_that_wait_in_vain():
    silent = without(r"@%p\d+ atom\.global\.gpu\.release")
    with emulated(LATE, silent), pytest.raises(Fault, match="wait for each other for ever"):
        handed_over()


def test_programs_that_do_not_wait():
    never = instead(r"ld\.acquire\.gpu\.global\.b32 (%r\d+), [^;]*", r"mov.u32 \1, 1000")
    with emulated(LATE, never):
        got = handed_over()
    assert not torch.allclose(got["out"], got["wanted"])


def test_out_of_bounds():
    left, right = drawn(64, 32, 64)
    with emulated(EARLY), pytest.raises(Fault, match="out of bounds"):
        product(left[:40].clone(), torch.cat([right, right]))  # A has half the columns it should


def test_products_that_some_warp_never_issues():
    def skipping(text):
        """Warp 0 jumps over the first commit to the end."""
        place = text.index("wgmma.fence")
        jump = "mov.u32 %r0, %tid.x;\nsetp.lt.u32 %p0, %r0, 32;\n@%p0 bra $L__end;\n"
        return text[:place] + jump + text[place:].replace("\tret;", "$L__end:\n\tret;", 1)

    left, right = drawn(64, 32, 64)
    with emulated(EARLY, skipping), pytest.raises(Fault, match="some warp never issues"):
        product(left, right)


def test_what_is_not_known_is_said():
    def strange(text):
        return text.replace("\tret;", "\tnanosleep.u32 \t20;\n\tret;", 1)

    left, right = drawn(64, 32, 64)
    with emulated(EARLY, strange), pytest.raises(Fault, match=r"does not know .* nanosleep"):
        product(left, right)
