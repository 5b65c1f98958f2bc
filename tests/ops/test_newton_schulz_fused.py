"""Newton-Schulz by kernels against the parallel form in fp64, in values and gradients.

The bar is hardware's: at most twice the error of the parallel form in the same dtype. Without a GPU the
kernels run interpreted, where bf16 has no products.
"""

import math
import sys

import pytest
import torch

from tests.builders import leaf, seeded
from tests.ops.judging import assert_within_twice, distance

pytest.importorskip("triton", reason="kernels need Triton")

from atlas_lm.ops.newton_schulz import SCHEDULES, fused, newton_schulz, schedule
from atlas_lm.ops.newton_schulz.fused import CONFIGS, declines, newton_schulz_fused

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# the interpreter of Triton 3.6 reads the bounds of a loop in a way that NumPy deprecates
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
HALF = torch.bfloat16 if CUDA else torch.float16
SHAPES = {
    "square": (8, 16, 16),
    "wide": (3, 20, 52),
    "tall": (3, 52, 20),
    "tiny": (12, 3, 5),
    "batch dims": (2, 1, 3, 7, 18),
    "long": (3, 9, 200),
}
WHOLE, TILED = CONFIGS[0], CONFIGS[2]


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=seeded(seed)).to(DEVICE, dtype)


def both(run, matrix, weight):
    """The result and the gradient of its product with the weight."""
    matrix = leaf(matrix)
    y = run(matrix)
    (grad,) = torch.autograd.grad(y, matrix, weight)
    return {"value": y.detach(), "gradient": grad}


def assert_twice_plain(got, matrix, weight, steps=5, name="muon", eps=1e-7):
    """`got` is no further from fp64 than twice the parallel form in the dtype of the matrix."""

    def parallel(x):
        return newton_schulz(x, steps, name=name, eps=eps, form="parallel")

    truth = both(parallel, matrix.double(), weight.double())
    plain = both(parallel, matrix, weight)
    assert all(x.dtype == matrix.dtype and x.shape == matrix.shape for x in got.values())
    assert_within_twice(got, plain, truth)


def launched(matrix, weight, config, steps=5, name="muon", eps=1e-7):
    return {
        "value": fused._forward(matrix, steps, name, eps, config),
        "gradient": fused.backward(matrix, weight, steps, name, eps, config),
    }


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", SHAPES)
def test_no_worse_than_twice_the_parallel_form(kind, dtype):
    matrix, weight = (draw(SHAPES[kind], dtype, seed) for seed in (0, 1))
    got = both(lambda x: newton_schulz_fused(x, 5), matrix, weight)
    assert_twice_plain(got, matrix, weight)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(2, 9, 150), (2, 150, 12), (1, 70, 90)])
def test_tiles_change_nothing_but_rounding(shape, dtype):
    matrix, weight = (draw(shape, dtype, seed) for seed in (0, 1))
    for config in (WHOLE, TILED):
        assert_twice_plain(launched(matrix, weight, config), matrix, weight)


@pytest.mark.parametrize(
    ("name", "steps", "config"),
    [(name, steps, WHOLE) for name in SCHEDULES for steps in (1, 5)]
    + [("polar_express", 3, TILED)],
)
def test_every_schedule(name, steps, config):
    """Many matrices: the rounding of a norm shifts a whole matrix, and a steep schedule amplifies it."""
    matrix, weight = (draw((16, 6, 70), seed=seed) for seed in (0, 1))
    got = launched(matrix, weight, config, steps, name, 1e-3)
    assert_twice_plain(got, matrix, weight, steps, name, 1e-3)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 1)])
def test_rows_and_columns(shape):
    """Their one singular value starts at one: every matrix makes the same rounding errors."""
    matrix, weight = (draw(shape, seed=seed) for seed in (0, 1))
    got = both(lambda x: newton_schulz_fused(x, 5), matrix, weight)
    truth = both(lambda x: newton_schulz(x, 5), matrix.double(), weight.double())
    assert all(distance(got[what], truth[what]) < 1e-5 for what in truth)


def test_no_steps_is_the_identity():
    matrix = draw((2, 7, 3))
    assert newton_schulz_fused(matrix, 0) is matrix


def test_large_eps_is_part_of_the_result():
    matrix, weight = (draw((8, 4, 6), seed=seed) for seed in (0, 1))
    got = both(lambda x: newton_schulz_fused(x, 3, eps=50.0), matrix, weight)
    assert_twice_plain(got, matrix, weight, steps=3, eps=50.0)


@pytest.mark.parametrize("config", [WHOLE, TILED])
@pytest.mark.parametrize("name", SCHEDULES)
def test_zero_gives_zero_and_the_gradient_of_its_linear_part(name, config):
    """A zero matrix beside another one: slope of S / eps through the polynomial, nothing for the norm."""
    matrix, weight = draw((2, 5, 70)), draw((2, 5, 70), seed=1)
    matrix[0] = 0
    got = launched(matrix, weight, config, 4, name, 1e-2)
    slope = math.prod(a for a, _, _ in schedule(name, 4)) / 1e-2
    assert bool((got["value"][0] == 0).all())
    torch.testing.assert_close(got["gradient"][0], slope * weight[0], rtol=1e-5, atol=0)
    beside = newton_schulz(matrix[1].double(), 4, name=name, eps=1e-2)
    assert distance(got["value"][1], beside) < 1e-4
    assert bool(got["gradient"].isfinite().all())


@pytest.mark.parametrize("config", [WHOLE, TILED])
def test_same_bits_every_time(config):
    """More matrices than programs: scratch is used again, and starts as NaN."""
    matrix, weight = (draw((3, 6, 70), seed=seed) for seed in (0, 1))
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        first, second = (launched(matrix, weight, config) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    alone = [launched(m, w, config) for m, w in zip(matrix, weight, strict=True)]
    for what in first:
        assert torch.equal(first[what], second[what])
        assert torch.equal(first[what], torch.stack([one[what] for one in alone]))


VIEWS = {
    "transposed": lambda x: x.mT,
    "sliced": lambda x: x[:, 1:, ::2],
    "batches swapped": lambda x: x.unflatten(0, (2, 2)).transpose(0, 1),
    "one for all": lambda x: x[:1].expand(4, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view):
    """Of the matrix and of the gradient that comes in."""
    matrix, weight = (VIEWS[view](draw((4, 9, 40), seed=seed)) for seed in (0, 1))
    got = launched(matrix, weight, None)
    wanted = launched(matrix.contiguous(), weight.contiguous(), None)
    for what in wanted:
        torch.testing.assert_close(got[what], wanted[what], rtol=1e-4, atol=1e-5)
    assert_twice_plain(got, matrix, weight)


def test_transposed_in_transposed_out():
    matrix = draw((2, 20, 7))
    assert torch.equal(newton_schulz_fused(matrix.mT, 5), newton_schulz_fused(matrix, 5).mT)


def test_a_sum_hands_down_a_gradient_without_strides():
    matrix = leaf(draw((2, 4, 6)))
    newton_schulz_fused(matrix, 2).sum().backward()
    (wanted,) = torch.autograd.grad(newton_schulz(matrix, 2, form="parallel").sum(), matrix)
    torch.testing.assert_close(matrix.grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused():
    matrix = leaf(draw((3, 4)))
    y = newton_schulz(matrix, 2, form="fused")
    (grad,) = torch.autograd.grad(y.square().sum(), matrix, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.empty(2, 129, 200), "129 x 200, kernels hold at most 128"),
        (torch.empty(5000, 2), "5000 x 2, kernels hold at most 128 on the short side and 4096"),
        (torch.empty(0, 3, 4), r"shape \[0, 3, 4\], wanted"),
        (torch.empty(3), r"shape \[3\], wanted"),
        (torch.empty(2, 2, dtype=torch.int32), r"torch.int32, kernels take fp32"),
    ],
)
def test_what_does_not_fit_is_declined(matrix, words):
    with pytest.raises(ValueError, match=words):
        newton_schulz_fused(matrix, 5)


@pytest.mark.skipif(CUDA, reason="bf16 is declined under the interpreter alone")
def test_the_interpreter_declines_bf16():
    assert "interpreter" in (declines(torch.ones(2, 2, dtype=torch.bfloat16)) or "")


def test_the_door_takes_the_kernels():
    matrix = draw((2, 5, 9))
    assert torch.equal(newton_schulz(matrix, 3, form="fused"), newton_schulz_fused(matrix, 3))
    assert "atlas_lm.ops.newton_schulz.kernels" in sys.modules


REAL = [(600, 64, 256), (600, 256, 64), (600, 64, 64), (300, 128, 128), (150, 128, 512)]
REAL += [(300, 512, 64), (300, 32, 512), (300, 48, 200), (300, 16, 16), (70, 100, 300)]


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", REAL, ids=str)
    def test_real_sizes(self, shape, dtype):
        matrix, weight = (draw(shape, dtype, seed) / 4 for seed in (0, 1))  # |S|^2 fits fp16
        got = both(lambda x: newton_schulz(x, 5), matrix, weight)
        again = both(lambda x: newton_schulz(x, 5, form="fused"), matrix, weight)
        assert all(torch.equal(got[what], again[what]) for what in got)
        assert_twice_plain(got, matrix, weight)

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_every_schedule_in_bf16(self, name):
        matrix, weight = (draw((600, 64, 256), torch.bfloat16, seed) for seed in (0, 1))
        got = both(lambda x: newton_schulz(x, 8, name=name, eps=1e-3), matrix, weight)
        assert_twice_plain(got, matrix, weight, 8, name, 1e-3)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_every_config(self, config):
        matrix, weight = (draw((600, 64, 256), torch.bfloat16, seed) for seed in (0, 1))
        assert_twice_plain(launched(matrix, weight, config), matrix, weight)

    def test_too_large_runs_the_parallel_form(self):
        matrix = draw((2, 200, 300))
        got = newton_schulz(matrix, 5)
        assert torch.equal(got, newton_schulz(matrix, 5, form="parallel"))
