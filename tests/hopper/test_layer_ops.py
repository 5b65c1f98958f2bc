"""What stands around a memory, as compiled for Hopper with the tiles that a GPU would run, by emulation."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels are written in Triton")

from tests.hopper.orders import in_all_orders, late
from tests.ops import test_gated_norm, test_linear_cross_entropy, test_short_conv
from tests.ops.judging import assert_within_twice

BF16, FP32 = torch.bfloat16, torch.float32
SLACK = {BF16: 4e-4, FP32: 2e-7}  # a tenth of a rounding and two, as on the device


def judge(dtype, call, run=late):
    """call: results by name, of a form and in a dtype"""
    truth, plain = call("parallel", torch.float64), call("parallel", dtype)
    assert_within_twice(run(lambda: call("fused", dtype)), plain, truth, SLACK[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        test_short_conv.Case(tokens=20, channels=(128, 64), units=(64, None), batch=2),
        test_short_conv.Case(tokens=20, channels=(96,), units=(16,), count=(20, 0, 7)),
        test_short_conv.Case(size=2, tokens=3, channels=(24, 40), units=(None, 8), tail=False),
    ],
    ids=str,
)
def test_the_short_convolution(case, dtype):
    inputs, cover = test_short_conv.draw(case, dtype)
    judge(dtype, lambda form, t: test_short_conv.run(form, case, inputs, cover, t), in_all_orders)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 4, 64), (37, 24), (3, 256)], ids=str)
def test_the_gated_norm(shape, dtype):
    inputs, cover = test_gated_norm.draw(shape, dtype)
    judge(dtype, lambda form, t: test_gated_norm.run(form, inputs, cover, t), in_all_orders)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_loss_of_a_vocabulary(dtype):
    """Several blocks of a row to a program; products are PyTorch's."""
    hidden, weight, labels = test_linear_cross_entropy.draw(
        7, ignored=(2,), dtype=dtype, width=64, vocab=5000
    )
    run = test_linear_cross_entropy.run
    judge(dtype, lambda form, t: run(form, hidden.to(t), weight.to(t), labels))
