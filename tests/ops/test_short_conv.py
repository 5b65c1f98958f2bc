"""The short convolution: sums of columns and kernels against the loop over tokens, values and gradients."""

import dataclasses

import pytest
import torch

from atlas_lm.memory.features import unit
from atlas_lm.ops.short_conv import short_conv
from tests.builders import leaf, leaves, seeded
from tests.ops.judging import assert_near, assert_within_twice

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
FORMS = ["parallel", "fused"]
EXACT = {"parallel": 1e-13, "fused": 2e-6}


@dataclasses.dataclass(frozen=True)
class Case:
    size: int = 4
    tokens: int = 13
    channels: tuple[int, ...] = (12, 6)
    units: tuple[int | None, ...] = (3, None)
    tail: bool = True
    count: tuple[int, ...] | None = None
    batch: int = 3


CASES = [
    Case(),
    Case(tail=False),
    Case(units=(None, None)),
    Case(count=(13, 0, 5)),
    Case(count=(1, 2, 12), tail=False),
    Case(size=1, units=(6, 2)),
    Case(size=2, count=(13, 1, 0)),
    Case(size=8, tokens=5),
    Case(size=8, tokens=5, count=(5, 3, 0)),
    Case(size=8, tokens=20, tail=False, count=(3, 20, 9)),
    Case(tokens=1),
    Case(tokens=2, tail=False),
    Case(tokens=1, count=(1, 0, 1)),
    Case(channels=(10, 5, 15), units=(5, None, 15), batch=1),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs along tokens and along channels."""
    if not CUDA:
        pytest.importorskip("triton", reason="the fused form is written in Triton")
        from atlas_lm.ops.short_conv import fused

        monkeypatch.setattr(fused, "ELEMENTS", 32)
        monkeypatch.setattr(fused, "CHANNELS", 8)


def draw(case, dtype=torch.float64, seed=0):
    """Inputs by name, and what the outputs are multiplied with."""
    generator, total = seeded(seed), sum(case.channels)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    inputs = {f"part {i}": normal(case.batch, case.tokens, n) for i, n in enumerate(case.channels)}
    inputs["weight"] = normal(case.size, total)
    if case.tail:
        inputs["tail"] = normal(case.batch, case.size - 1, total)
    cover = {f"y {i}": normal(case.batch, case.tokens, n) for i, n in enumerate(case.channels)}
    return inputs, cover | {"after": normal(case.batch, case.size - 1, total)}


def call(form, case, inputs):
    parts = [inputs[f"part {i}"] for i in range(len(case.channels))]
    count = None if case.count is None else torch.tensor(case.count, device=DEVICE)
    ys, after = short_conv(
        parts, inputs["weight"], inputs.get("tail"), count, units=case.units, form=form
    )
    return {f"y {i}": y for i, y in enumerate(ys)} | {"after": after}


def run(form, case, inputs, cover, dtype=None):
    """Outputs and gradients by name."""
    inputs = leaves({n: x if dtype is None else x.to(dtype) for n, x in inputs.items()})
    made = call(form, case, inputs)
    found = torch.autograd.grad(
        [y for y in made.values() if y.numel()],
        list(inputs.values()),
        [cover[n].to(y.dtype) for n, y in made.items() if y.numel()],
        allow_unused=True,
        materialize_grads=True,
    )
    grads = {f"d {n}": x for n, x in zip(inputs, found, strict=True)}
    return {n: y.detach() for n, y in made.items()} | grads


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loop_over_tokens(case, form):
    inputs, cover = draw(case)
    truth = run("reference", case, inputs, cover)
    dtype = torch.float64 if form == "parallel" else torch.float32
    assert_near(run(form, case, inputs, cover, dtype), truth, EXACT[form])


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[8]], ids=str)
def test_half_precision_is_rounded_once(case):
    inputs, cover = draw(case, torch.float16)
    truth, plain = (run("parallel", case, inputs, cover, t) for t in (torch.float64, torch.float16))
    got = run("fused", case, inputs, cover)
    assert all(got[name].dtype == torch.float16 for name in got)
    assert_within_twice(got, plain, truth, 1e-4)


def test_bf16_needs_no_products():
    """So the kernels' own bf16 can be interpreted, though the door declines it there."""
    from atlas_lm.ops.short_conv.fused import short_conv_fused

    case = Case(count=(13, 0, 5))
    inputs, cover = draw(case, torch.bfloat16)
    truth, plain = (
        run("parallel", case, inputs, cover, t) for t in (torch.float64, torch.bfloat16)
    )
    parts = [inputs["part 0"], inputs["part 1"]]
    count = torch.tensor(case.count, device=DEVICE)
    ys, after = short_conv_fused(parts, inputs["weight"], inputs["tail"], count, case.units)
    got = {"y 0": ys[0], "y 1": ys[1], "after": after}
    assert_within_twice(got, plain, {name: truth[name] for name in got})


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_how_a_stream_is_cut_changes_nothing(form):
    case = Case(batch=1, tokens=17)
    inputs, _ = draw(case, torch.float32)
    whole = call(form, case, inputs)
    tail, found = inputs["tail"], []
    for first, stop in ((0, 1), (1, 3), (3, 12), (12, 17)):
        now = {n: x[:, first:stop] if n.startswith("part") else x for n, x in inputs.items()}
        made = call(form, case, now | {"tail": tail})
        tail = made.pop("after")
        found.append(made)
    got = {n: torch.cat([made[n] for made in found], dim=1) for n in ("y 0", "y 1")}
    assert_near(got | {"after": tail}, whole, 1e-6)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_heads_have_the_length_that_features_give_them(form):
    """The one convention of unit length: a head of zeros stays zero."""
    case = Case(units=(3, None))
    inputs, cover = draw(case, torch.float32)
    inputs["part 0"][..., 3:6] = 0
    inputs["tail"][..., 3:6] = 0
    made = run(form, case, inputs, cover)
    bare = call("reference", dataclasses.replace(case, units=(None, None)), inputs)["y 0"]
    wanted = unit(bare.unflatten(-1, (-1, 3))).flatten(-2)
    assert_near({"y": made["y 0"]}, {"y": wanted}, 1e-6)
    assert bool((made["y 0"][..., 3:6] == 0).all())
    assert all(bool(x.isfinite().all()) for x in made.values())


@pytest.mark.parametrize("form", FORMS)
def test_heads_shorter_than_the_floor_are_divided_by_it(form):
    x = torch.full((1, 1, 2), 1e-8, device=DEVICE)
    weight = torch.ones(1, 2, device=DEVICE)
    x = leaf(x)
    (y,), _ = short_conv([x], weight, None, units=[2], form=form)
    torch.testing.assert_close(y, 0.5 * x.detach() / 1e-6)  # SiLU halves what is small
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 0.5e6))


def test_parts_and_gradients_of_any_strides():
    case = Case(units=(3, None))
    inputs, cover = draw(case, torch.float32)
    turned = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in inputs.items()}
    wide = torch.zeros(4, 20, device=DEVICE)
    wide[:, :18] = inputs["weight"]
    turned["weight"] = wide[:, :18]
    cover = {n: x.expand_as(x) for n, x in cover.items()} | {"y 0": torch.ones(1, device=DEVICE)}
    cover["y 0"] = cover["y 0"].expand(3, 13, 12)
    assert_near(run("fused", case, turned, cover), run("fused", case, inputs, cover), 1e-6)


def test_same_bits_every_time():
    case = CASES[3]
    inputs, cover = draw(case, torch.float32)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        first, second = (run("fused", case, inputs, cover) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", FORMS)
def test_a_wider_weight_and_tail_leave_parts_in_their_dtype(form):
    """As under autocast: projections in half precision, weights and what a stream began with in fp32."""
    case = Case(units=(3, None))
    inputs, _ = draw(case, torch.float32)
    wanted = call("reference", case, inputs)
    half = {n: x.half() if n.startswith("part") else x for n, x in inputs.items()}
    got = call(form, case, half)
    assert {n: y.dtype for n, y in got.items()} == {
        "y 0": torch.float16, "y 1": torch.float16, "after": torch.float32,
    }  # fmt: skip
    assert_near(got, wanted, 2e-3)


def test_a_second_derivative_is_refused():
    case = Case(tail=False)
    inputs, _ = draw(case, torch.float32)
    inputs = leaves(inputs)
    y = call("fused", case, inputs)["y 0"]
    (grad,) = torch.autograd.grad(y.square().sum(), inputs["weight"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


X = torch.zeros(2, 5, 6)
FIELDS = dict(parts=[X], weight=torch.zeros(4, 6), tail=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(parts=[X, X]), "parts have 12 channels, weight has 6"),
        (dict(parts=[X[..., :3], X[:, 1:, :3]]), r"parts\[1\] has shape \[2, 4, 3\], wanted"),
        (dict(parts=[X[..., :3], X[..., :3].half()]), "wanted one dtype"),
        (dict(tail=torch.zeros(2, 4, 6)), r"tail has shape \[2, 4, 6\], wanted \[2, 3, 6\]"),
        (dict(count=torch.zeros(3)), r"count has shape \[3\], wanted \[2\]"),
        (dict(units=[2, 2]), "units are 2, parts are 1"),
        (dict(units=[4]), "6 channels, which heads of 4 do not fill"),
        (dict(form="fast"), "form is 'fast'"),
        (dict(weight=torch.zeros(9, 6), form="fused"), "9 taps, kernels take at most 8"),
        (dict(parts=[X.double()], form="fused"), "inputs are fp64"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    moved = {
        n: [p.to(DEVICE) for p in x] if n == "parts" else x.to(DEVICE) if torch.is_tensor(x) else x
        for n, x in (FIELDS | change).items()
    }
    with pytest.raises(ValueError, match=words):
        short_conv(**moved)


def test_heads_too_wide_for_a_program_are_refused():
    x = torch.zeros(1, 1, 5000, device=DEVICE)
    with pytest.raises(ValueError, match="5000 channels, kernels hold at most 4096"):
        short_conv([x], torch.zeros(4, 5000, device=DEVICE), None, units=[5000], form="fused")


REAL = [
    Case(tokens=1000, channels=(512, 512, 1024), units=(128, 128, None), batch=2),
    Case(tokens=1000, channels=(512, 512, 768), units=(64, 64, None), batch=2, tail=False),
    Case(tokens=301, channels=(306, 306, 200), units=(153, 153, None), batch=2, count=(301, 77)),
    Case(tokens=1, channels=(512, 512, 512), units=(128, 128, None), batch=64),
    Case(tokens=3, channels=(512, 512, 512), units=(128, 128, None), batch=4, count=(3, 0, 1, 2)),
    Case(size=8, tokens=100, channels=(256, 40), units=(256, None), batch=3),
    Case(size=1, tokens=100, channels=(256, 40), units=(32, 8), batch=3),
]


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("case", REAL, ids=str)
    def test_real_sizes(self, case, dtype):
        inputs, cover = draw(case, dtype)
        truth, plain = (run("parallel", case, inputs, cover, t) for t in (torch.float64, dtype))
        slack = {torch.bfloat16: 4e-4, torch.float16: 5e-5, torch.float32: 1.2e-7}[dtype]
        got = run("fused", case, inputs, cover)
        assert_within_twice(got, plain, truth, slack)
        again = run("auto", case, inputs, cover)
        assert all(torch.equal(got[name], again[name]) for name in got)

    def test_a_row_beyond_two_to_the_31_entries(self):
        """One row of 2^25 tokens and 80 channels: its end is what the same tokens give on their own."""
        tokens, channels = 1 << 25, 80
        x = torch.zeros(1, tokens, channels, dtype=torch.bfloat16, device=DEVICE)
        end = torch.randn(1, 40, channels, generator=seeded(0)).to(x)
        weight = torch.randn(4, channels, generator=seeded(1)).to(x)
        x[:, -40:] = end
        x = x.requires_grad_()
        (y,), after = short_conv([x], weight, None, form="fused")
        torch.autograd.backward([y, after], [torch.ones_like(y), torch.ones_like(after)])
        alone = leaf(end)
        (wanted,), last = short_conv([alone], weight, torch.zeros_like(end[:, :3]), form="fused")
        torch.autograd.backward([wanted, last], [torch.ones_like(wanted), torch.ones_like(last)])
        assert torch.equal(y[:, -40:], wanted) and torch.equal(after, last)
        assert torch.equal(x.grad[:, -40:], alone.grad)
