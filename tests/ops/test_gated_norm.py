"""The gated norm by PyTorch and by kernels against the formula, in values and gradients."""

import pytest
import torch

from atlas_lm.ops.gated_norm import gated_norm
from tests.builders import leaf, leaves, seeded
from tests.ops.judging import assert_near, assert_within_twice

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
FORMS = ["parallel", "fused"]
SHAPES = [(1, 1), (5, 8), (2, 3, 2, 12), (41, 16), (2, 9, 1, 5), (3, 40)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs, each with several blocks of rows, the last of them not full."""
    if not CUDA:
        pytest.importorskip("triton", reason="the fused form is written in Triton")
        from atlas_lm.ops.gated_norm import fused

        monkeypatch.setattr(fused, "ELEMENTS", 32)


def draw(shape, dtype=torch.float64):
    """Inputs by name, and what the output is multiplied with."""
    generator = seeded(0)
    shapes = dict(x=shape, gate=shape, weight=shape[-1:], cover=shape)
    made = {n: torch.randn(s, generator=generator).to(DEVICE, dtype) for n, s in shapes.items()}
    cover = made.pop("cover")
    return made, cover


def run(form, inputs, cover, dtype=None, eps=1e-6):
    inputs = leaves({n: x if dtype is None else x.to(dtype) for n, x in inputs.items()})
    y = gated_norm(**inputs, eps=eps, form=form)
    grads = torch.autograd.grad(y, list(inputs.values()), cover.to(y.dtype))
    return {"y": y.detach()} | {f"d {n}": x for n, x in zip(inputs, grads, strict=True)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(shape, eps, form):
    inputs, cover = draw(shape)
    truth = run("reference", inputs, cover, eps=eps)
    dtype = torch.float64 if form == "parallel" else torch.float32
    got = run(form, inputs, cover, dtype, eps)
    # of a row of one value the norm leaves the sign alone: the gradient is what eps leaves of it
    kept = [n for n in truth if shape[-1] > 1 or eps > 0.1 or n != "d x"]
    limit = 1e-13 if form == "parallel" else 2e-6
    assert_near({n: got[n] for n in kept}, {n: truth[n] for n in kept}, limit)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros_have_finite_gradients(form):
    inputs, cover = draw((4, 8), torch.float32)
    inputs["x"][1] = 0
    got = run(form, inputs, cover, eps=1e-2)
    assert bool((got["y"][1] == 0).all())
    gate = inputs["gate"][1]
    slope = cover[1] * inputs["weight"] * gate * gate.sigmoid() / 1e-2**0.5
    torch.testing.assert_close(got["d x"][1], slope)


@pytest.mark.parametrize("shape", [(41, 16), (3, 40)], ids=str)
def test_half_precision_is_rounded_once(shape):
    inputs, cover = draw(shape, torch.float16)
    truth, plain = (run("parallel", inputs, cover, t) for t in (torch.float64, torch.float16))
    got = run("fused", inputs, cover)
    assert all(x.dtype == torch.float16 for x in got.values())
    assert_within_twice(got, plain, truth)


def test_bf16_needs_no_products():
    """So the kernels' own bf16 can be interpreted, though the door declines it there."""
    from atlas_lm.ops.gated_norm.fused import gated_norm_fused

    inputs, cover = draw((41, 16), torch.bfloat16)
    truth, plain = (run("parallel", inputs, cover, t) for t in (torch.float64, torch.bfloat16))
    got = {"y": gated_norm_fused(**inputs, eps=1e-6)}
    assert_within_twice(got, plain, {"y": truth["y"]})


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_may_differ(form):
    """A memory read in fp32, gates of half precision: the wider one comes out, each gradient in its own."""
    inputs, cover = draw((5, 8), torch.float32)
    truth = run("reference", inputs, cover)
    half = inputs | {"gate": inputs["gate"].half()}
    got = run(form, half, cover)
    assert [x.dtype for x in got.values()] == [
        torch.float32, torch.float32, torch.float16, torch.float32,
    ]  # fmt: skip
    assert_near(got, truth, 2e-3)


def test_inputs_and_gradients_of_any_strides():
    inputs, cover = draw((3, 7, 8), torch.float32)
    turned = inputs | {
        n: inputs[n].transpose(0, 1).contiguous().mT.mT.transpose(0, 1) for n in ("x", "gate")
    }
    assert not turned["x"].is_contiguous()
    wanted = run("fused", inputs, cover)
    got = run("fused", turned, cover.transpose(0, 1).contiguous().transpose(0, 1))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    x = leaf(turned["x"])
    gated_norm(x, turned["gate"], inputs["weight"], 1e-6, form="fused").sum().backward()
    ones = run("fused", inputs, torch.ones_like(cover))
    assert torch.equal(x.grad, ones["d x"])


def test_same_bits_every_time():
    inputs, cover = draw((41, 16), torch.float32)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        first, second = (run("fused", inputs, cover) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_derivative_is_refused():
    inputs = leaves(draw((4, 8), torch.float32)[0])
    y = gated_norm(**inputs, eps=1e-6, form="fused")
    (grad,) = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(weight=torch.zeros(5)), r"weight has shape \[5\], wanted \[8\]"),
        (dict(gate=torch.zeros(2, 16)), r"gate has shape \[2, 16\], wanted \[4, 8\]"),
        (dict(form="fast"), "form is 'fast'"),
        (dict(x=torch.zeros(4, 8).double(), form="fused"), "inputs are fp64"),
        (
            dict(
                x=torch.zeros(1, 5000),
                gate=torch.zeros(1, 5000),
                weight=torch.zeros(5000),
                form="fused",
            ),
            "5000 values, kernels hold at most 4096",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    fields = dict(x=torch.zeros(4, 8), gate=torch.zeros(4, 8), weight=torch.zeros(8), eps=1e-6)
    moved = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in (fields | change).items()}
    with pytest.raises(ValueError, match=words):
        gated_norm(**moved)


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "shape", [(2, 1000, 8, 128), (3, 301, 4, 72), (64, 1, 8, 256)], ids=str
    )
    def test_real_sizes(self, shape, dtype):
        inputs, cover = draw(shape, dtype)
        truth, plain = (run("parallel", inputs, cover, t) for t in (torch.float64, dtype))
        slack = {torch.bfloat16: 4e-4, torch.float16: 5e-5, torch.float32: 1.2e-7}[dtype]
        got = run("fused", inputs, cover)
        assert_within_twice(got, plain, truth, slack)
        again = run("auto", inputs, cover)
        assert all(torch.equal(got[name], again[name]) for name in got)

    def test_beyond_two_to_the_31_entries(self):
        rows = (1 << 24) + 8
        x, gate = (torch.zeros(rows, 136, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        end, opened = (torch.randn(8, 136, generator=seeded(n)).to(x) for n in (0, 1))
        weight = torch.randn(136, generator=seeded(2)).to(x)
        x[-8:], gate[-8:] = end, opened
        got = gated_norm(x, gate, weight, 1e-6, form="fused")[-8:]
        assert torch.equal(got, gated_norm(end, opened, weight, 1e-6, form="fused"))
