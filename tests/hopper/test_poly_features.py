"""Polynomial features as compiled for Hopper: their numbers by emulation, and what they take."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels are written in Triton")

from benchmarks.kernel_bench.hopper import launches_to
from benchmarks.registers import assembled
from tests.hopper.orders import in_all_orders, late
from tests.ops.judging import assert_within_twice
from tests.ops.test_poly_features import SLACK, given, run

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "size", "degree", "words"),
    [
        (BF16, 16, 2, dict(unit=True, width=160)),
        (BF16, 16, 2, dict(unit=False, width=None)),
        (FP32, 16, 2, dict(unit=True, width=160, dtype_of_result=BF16)),
        (BF16, 5, 3, dict(unit=True, width=None)),
        (BF16, 128, 1, dict(unit=True, width=136)),
    ],
    ids=str,
)
def test_numbers(dtype, size, degree, words):
    inputs = given((1, 37, 2, size), degree, dtype)
    plain = run("parallel", inputs, **words)
    truth = run("parallel", inputs, torch.float64, **words | {"dtype_of_result": None})
    take = in_all_orders if words["width"] == 160 and dtype == BF16 else late
    got = take(lambda: run("fused", inputs, **words))
    assert_within_twice(got, plain, truth, SLACK[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("size", "degree", "width"), [(16, 2, 160), (128, 2, None), (16, 3, 976)])
def test_nothing_is_spilled(size, degree, width, dtype):
    found = []
    with launches_to(lambda launch: found.append(assembled(launch))):
        run("fused", given((2, 300, 4, size), degree, dtype), unit=True, width=width)
    assert [row.kernel for row in found] == ["forward_kernel", "backward_kernel"]
    assert all(row.spills == 0 and row.programs >= 2 for row in found)
