"""Monomials whose inner product is a polynomial of q.k."""

import math

import pytest
import torch

from atlas_lm.ops.poly_features import poly_features, poly_features_reference, poly_width
from tests.builders import assert_all_close, assert_close, gradients, leaf, leaves, seeded, wave
from tests.ops.judging import assert_near, assert_within_twice

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
SLACK = {torch.bfloat16: 4e-4, torch.float16: 5e-5, torch.float32: 1.2e-7}
SIZES = [(1, 3), (2, 2), (3, 1), (4, 4), (5, 3), (8, 2)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_inner_product_is_a_polynomial_of_the_inner_product(size, degree):
    q, k, c = draw(6, size), draw(6, size, seed=1), draw(degree + 1, seed=2)
    got = (poly_features(q, c, degree) * poly_features(k, c, degree)).sum(-1)
    product = (q * k).sum(-1)
    assert_close("kernel", got, sum(c[i] ** 2 * product**i for i in range(degree + 1)), 1e-13)


@pytest.mark.parametrize(("size", "degree"), SIZES)
def test_matches_the_reference_in_order_and_gradient(size, degree):
    def run(function):
        inputs = dict(x=leaf(draw(2, 3, 5, size)), c=leaf(draw(3, 1, degree + 1, seed=1)))
        y = function(inputs["x"], inputs["c"], degree)
        return {"phi": y} | gradients(wave(y), inputs)

    assert_all_close(run(poly_features), run(poly_features_reference), 1e-12)


def test_order_is_that_of_sorted_index_tuples():
    """Two variables, degree 2: 1, x, y, xx, xy, yy."""
    x, c = torch.tensor([3.0, 5.0]), torch.tensor([7.0, 11.0, 13.0])
    wanted = torch.tensor([7, 33, 55, 13 * 9, 13 * math.sqrt(2) * 15, 13 * 25])
    assert_close("order", poly_features(x, c, 2), wanted, 1e-6)
    assert_close("order", poly_features_reference(x, c, 2), wanted, 1e-6)


@pytest.mark.parametrize(("size", "degree"), SIZES)
def test_width_is_the_number_of_features(size, degree):
    features = poly_features(draw(size), draw(degree + 1), degree)
    assert features.shape == (poly_width(size, degree),)
    assert poly_width(16, 2) == 153


@pytest.mark.parametrize(("size", "degree"), [(3, 1), (3, 2), (2, 4)])
def test_gradient_matches_finite_differences_at_zero_too(size, degree):
    x = torch.cat([draw(2, size), torch.zeros(1, size, dtype=torch.float64)])
    inputs = (leaf(x), leaf(draw(degree + 1, seed=1)))
    assert torch.autograd.gradcheck(lambda x, c: poly_features(x, c, degree), inputs)


@pytest.mark.parametrize("form", ["reference", "parallel"])
def test_gradient_of_a_direction_matches_finite_differences(form):
    inputs = (leaf(draw(2, 3, 4)), leaf(draw(3, 3, seed=1)))
    assert torch.autograd.gradcheck(
        lambda x, c: poly_features(x, c, 2, unit=True, width=16, form=form), inputs
    )


def test_amplitudes_broadcast_over_heads():
    x, c = draw(2, 3, 5, 4), draw(3, 1, 3, seed=1)
    whole = poly_features(x, c, 2)
    for head in range(3):
        assert_close("head", whole[:, head], poly_features(x[:, head], c[head, 0], 2), 1e-15)


def test_a_first_call_in_inference_mode_does_not_spoil_training():
    """The cached tables must not be tensors that autograd refuses later."""
    x, c = draw(4, 7, seed=3), draw(6, seed=4)  # sizes that no other test uses
    with torch.inference_mode():
        poly_features(x, c, 5)
    x, c = leaf(x), leaf(c)
    poly_features(x, c, 5).sum().backward()
    assert bool(x.grad.isfinite().all())


FUSED = [  # shape of x, degree, unit length first, width
    ((2, 7, 3, 4), 2, True, None),
    ((1, 41, 2, 16), 2, False, 160),
    ((3, 5, 1, 5), 1, True, None),
    ((1, 9, 2, 3), 3, True, 24),
    ((2, 1, 4, 8), 2, True, 48),
    ((6, 2, 5), 2, False, None),
    ((3, 7), 2, True, None),
    ((5,), 3, False, None),
]
fused_cases = pytest.mark.parametrize(("shape", "degree", "unit", "width"), FUSED)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs, the last of them not full, and several blocks of features."""
    if not CUDA:
        pytest.importorskip("triton", reason="the fused form is written in Triton")
        from atlas_lm.ops.poly_features import fused

        monkeypatch.setattr(fused, "FEATURES", 16)
        monkeypatch.setattr(fused, "ELEMENTS", 64)
        monkeypatch.setattr(fused, "SLOPES", 32)


def given(shape, degree, dtype=torch.float64):
    """x, amplitudes per head where there are heads, rounded to this dtype."""
    heads = shape[-2:-1] if len(shape) > 1 else ()
    made = dict(x=draw(*shape), amplitudes=draw(*heads, degree + 1, seed=1))
    return {n: x.to(DEVICE, dtype) for n, x in made.items()}


def run(form, inputs, dtype=None, dtype_of_result=None, **words):
    """Features and gradients; what the features are multiplied with is rounded as halves are."""
    inputs = leaves({n: x if dtype is None else x.to(dtype) for n, x in inputs.items()})
    degree = inputs["amplitudes"].shape[-1] - 1
    y = poly_features(**inputs, degree=degree, dtype=dtype_of_result, **words, form=form)
    cover = draw(*y.shape, seed=2).to(y.device, torch.float16).to(y.dtype)
    grads = torch.autograd.grad(y, list(inputs.values()), cover)
    return {"y": y.detach()} | {f"d {n}": g for n, g in zip(inputs, grads, strict=True)}


@pytest.mark.parametrize("form", ["parallel", "fused"])
@fused_cases
def test_forms_agree(shape, degree, unit, width, form, small_tiles):
    inputs, words = given(shape, degree), dict(unit=unit, width=width)
    truth = run("reference", inputs, **words)
    dtype = torch.float64 if form == "parallel" else torch.float32
    assert_near(run(form, inputs, dtype, **words), truth, 1e-13 if form == "parallel" else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@fused_cases
def test_errors_are_those_of_plain_pytorch(shape, degree, unit, width, dtype, small_tiles):
    inputs, words = given(shape, degree, dtype), dict(unit=unit, width=width)
    truth, plain = (run("parallel", inputs, t, **words) for t in (torch.float64, dtype))
    got = run("fused", inputs, **words)
    assert all(x.dtype == dtype for x in got.values())
    assert_within_twice(got, plain, truth, SLACK[dtype])


@pytest.mark.parametrize("unit", [False, True])
def test_bf16_needs_no_products(unit, small_tiles):
    """So the kernels' own bf16 can be interpreted, though the door declines it there."""
    from atlas_lm.ops.poly_features.fused import poly_features_fused

    inputs = given((1, 9, 2, 8), 2, torch.bfloat16)
    truth, plain = (run("parallel", inputs, t, unit=unit) for t in (torch.float64, torch.bfloat16))
    x, amplitudes = leaf(inputs["x"]), leaf(inputs["amplitudes"])
    y = poly_features_fused(x, amplitudes, 2, unit, 45, torch.bfloat16)
    cover = draw(*y.shape, seed=2).to(y.device, torch.float16).to(y.dtype)
    grads = torch.autograd.grad(y, [x, amplitudes], cover)
    got = dict(zip(truth, (y, *grads), strict=True))
    assert_within_twice(got, plain, truth, SLACK[torch.bfloat16])


@pytest.mark.parametrize("form", ["reference", "parallel", "fused"])
def test_beyond_the_features_are_zeros_that_nothing_reads(form, small_tiles):
    inputs = given((1, 9, 2, 4), 2, torch.float32)
    inputs["x"][0, 3, 1] = float("nan")
    y = poly_features(**inputs, degree=2, width=24, form=form)
    assert y.shape == (1, 9, 2, 24) and bool((y[..., 15:] == 0).all())
    x = leaf(given((1, 9, 2, 4), 2, torch.float32)["x"])
    y = poly_features(x, inputs["amplitudes"], 2, width=24, form=form)
    cover = torch.zeros_like(y)
    cover[..., 15:] = 1
    assert bool((torch.autograd.grad(y, x, cover)[0] == 0).all())


@pytest.mark.parametrize("form", ["reference", "parallel", "fused"])
def test_zeros_and_vectors_shorter_than_the_floor(form, small_tiles):
    """Zero stays zero; what is shorter than the floor is divided by it."""
    x = torch.zeros(1, 2, 1, 3, device=DEVICE)
    x[0, 1] = 1e-8
    x, c = leaf(x), torch.ones(3, device=DEVICE)
    y = poly_features(x, c, 2, unit=True, form=form)
    assert bool((y[0, 0, 0, 1:] == 0).all())
    torch.testing.assert_close(y[0, 1, 0, 1:4], torch.full((3,), 1e-2, device=DEVICE))
    (grad,) = torch.autograd.grad(y[..., 1:4].sum(), x)
    torch.testing.assert_close(grad, torch.full_like(grad, 1e6))


def test_a_dtype_of_the_result_and_weights_of_their_own(small_tiles):
    """As a memory asks for them: fp32 projections or halves, amplitudes in fp32, features in halves."""
    inputs = given((2, 9, 2, 4), 2, torch.float32)
    words = dict(unit=True, width=16)
    truth = run("reference", inputs, **words)
    got = run("fused", inputs, **words, dtype_of_result=torch.float16)
    assert [x.dtype for x in got.values()] == [torch.float16, torch.float32, torch.float32]
    assert_near(got, truth, 1e-3)
    inputs["x"] = inputs["x"].half()
    got = run("fused", inputs, **words)
    assert [x.dtype for x in got.values()] == [torch.float16, torch.float16, torch.float32]
    assert_near(got, truth, 2e-3)


def test_inputs_and_gradients_of_any_strides(small_tiles):
    inputs = given((2, 9, 2, 4), 2, torch.float32)
    wanted = run("fused", inputs, unit=True)
    turned = [
        inputs["x"].transpose(*axes).contiguous().transpose(*axes)
        for axes in ((1, 2), (0, 3), (2, 3))
    ]
    cut = torch.cat([inputs["x"], inputs["x"]], dim=-1)[..., :4]  # with gaps, as of projections
    cover = draw(*wanted["y"].shape, seed=2).to(DEVICE, torch.float16).float()
    cover = cover.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (*turned, cut):
        assert not x.is_contiguous()
        given_to = [x.detach().requires_grad_(), leaf(inputs["amplitudes"])]
        y = poly_features(*given_to, 2, unit=True, form="fused")
        grads = torch.autograd.grad(y, given_to, cover)
        assert all(torch.equal(a, b) for a, b in zip((y, *grads), wanted.values(), strict=True))


def test_same_bits_every_time(small_tiles):
    inputs = given((2, 41, 2, 4), 2, torch.float32)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        first, second = (run("fused", inputs, unit=True, width=16) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(bool(x.isfinite().all()) for x in first.values())


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (7, 3, 4), (50, 4)], ids=str)
def test_one_row_of_amplitudes_for_all(shape, small_tiles):
    inputs = given(shape, 2, torch.float32)
    inputs["amplitudes"] = inputs["amplitudes"][0]
    assert_near(run("fused", inputs), run("reference", inputs, torch.float64), 2e-6)


def test_a_second_derivative_is_refused(small_tiles):
    inputs = leaves(given((1, 3, 2, 4), 2, torch.float32))
    y = poly_features(**inputs, degree=2, form="fused")
    (grad,) = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(amplitudes=torch.ones(4)), r"amplitudes have shape \[4\], wanted 3 in the last axis"),
        (dict(width=14), "width is 14, which does not hold the 15 features"),
        (dict(form="fast"), "form is 'fast'"),
        (dict(x=torch.zeros(1, 2, 3, 4).double(), form="fused"), "inputs are fp64"),
        (
            dict(amplitudes=torch.ones(5), degree=4, form="fused"),
            "degree is 4, kernels take 1 to 3",
        ),
        (dict(x=torch.zeros(1, 2, 3, 129), form="fused"), "129 values, kernels take at most 128"),
        (dict(x=torch.zeros(1, 0, 3, 4), form="fused"), "which is empty"),
        (dict(amplitudes=torch.ones(3, 1, 3), form="fused"), r"one per head of x \[\.\., H, K\]"),
        (dict(amplitudes=torch.ones(2, 3), form="fused"), r"one per head of x \[\.\., H, K\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    fields = dict(x=torch.zeros(1, 2, 3, 4), amplitudes=torch.ones(3), degree=2) | change
    moved = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in fields.items()}
    with pytest.raises(ValueError, match=words):
        poly_features(**moved)


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("width", [None, 160])
    @pytest.mark.parametrize("unit", [False, True])
    @pytest.mark.parametrize("shape", [(2, 1000, 8, 16), (3, 301, 4, 13), (64, 1, 8, 16)], ids=str)
    def test_real_sizes(self, shape, unit, width, dtype):
        inputs, words = given(shape, 2, dtype), dict(unit=unit, width=width)
        truth, plain = (run("parallel", inputs, t, **words) for t in (torch.float64, dtype))
        got = run("fused", inputs, **words)
        assert_within_twice(got, plain, truth, SLACK[dtype])
        again = run("auto", inputs, **words)
        assert all(torch.equal(got[name], again[name]) for name in got)

    @pytest.mark.parametrize(("size", "degree"), [(64, 2), (128, 2), (16, 3), (128, 1)])
    def test_other_sizes(self, size, degree):
        inputs = given((2, 70, 2, size), degree, torch.bfloat16)
        truth, plain = (
            run("parallel", inputs, t, unit=True) for t in (torch.float64, torch.bfloat16)
        )
        assert_within_twice(run("fused", inputs, unit=True), plain, truth, SLACK[torch.bfloat16])

    def test_beyond_two_to_the_31_entries(self):
        """The end of a long row is what the same tokens give on their own, forward and backward."""
        tokens, width = (1 << 24) + 8, 160
        x = torch.zeros(1, tokens, 1, 16, dtype=torch.bfloat16, device=DEVICE)
        end = draw(1, 8, 1, 16).to(x)
        x[:, -8:] = end
        whole, alone, c = leaf(x), leaf(end), torch.ones(3, device=DEVICE)
        got = poly_features(whole, c, 2, unit=True, width=width, form="fused")
        wanted = poly_features(alone, c, 2, unit=True, width=width, form="fused")
        assert torch.equal(got[:, -8:], wanted)
        got.backward(torch.ones_like(got))
        wanted.backward(torch.ones_like(wanted))
        assert torch.equal(whole.grad[:, -8:], alone.grad)
