"""The fused delta rule and its plain tile form against the token loop, values and every gradient."""

import dataclasses
import math

import pytest
import torch

from atlas_lm.ops.delta_rule import delta_rule
from tests.builders import leaf, seeded
from tests.ops.judging import assert_near, assert_within_twice, distance

pytest.importorskip("triton", reason="the fused form is written in Triton")

# Triton's interpreter turns the bounds of loops into numbers the old way of NumPy
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)


@dataclasses.dataclass(frozen=True)
class Case:
    window: int = 1
    tokens: int = 75
    features: int = 16
    values: int = 16
    after: bool = False
    batch: int = 1
    heads: int = 1
    past: tuple[int, ...] | None = None  # existing pairs of each row; None: no pairs in front
    borders: tuple[int, ...] | None = None
    decays: bool = True
    warm: bool = True


def draw(case, *, spread=1.0, rate=(0.1, 1.0), device="cpu"):
    """Inputs by name in fp64: unit keys (alike where spread is small), gates well inside their range."""
    generator = seeded(case.tokens + 7 * case.window)
    rows = (case.batch, case.tokens, case.heads)
    pairs = (case.batch, case.tokens + (case.window - 1 if case.past else 0), case.heads)
    count = case.batch if case.borders is None else len(case.borders) - 1

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    k = normal(1, 1, case.heads, case.features) + spread * normal(*pairs, case.features)
    drawn = {
        "q": torch.nn.functional.normalize(normal(*rows, case.features), dim=-1),
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": normal(*pairs, case.values),
        "eta": uniform(*rate, *rows),
        "log_alpha": uniform(-0.3, 0, *rows) if case.decays else None,
        "gamma": uniform(0.2, 1, *rows, case.window) / case.window if case.window > 1 else None,
        "memory": normal(count, case.heads, case.values, case.features) if case.warm else None,
    }
    return {name: x if x is None else x.to(device) for name, x in drawn.items()}


def run(case, form, inputs, dtype):
    """Outputs and gradients by name. q, k and v in dtype; gates and memory in fp32, or fp64 with it."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {
        name: None if x is None else leaf(x.to(dtype if name in ("q", "k", "v") else wide))
        for name, x in inputs.items()
    }
    device = given["q"].device
    y, memory = delta_rule(
        **given,
        after_retention=case.after,
        past=None if case.past is None else torch.tensor(case.past, device=device),
        cu_seqlens=None if case.borders is None else torch.tensor(case.borders, device=device),
        form=form,
    )
    assert y.dtype == dtype
    assert memory.dtype == wide
    wanted = {name: x for name, x in given.items() if x is not None}
    loss = weighed(y, 1) + weighed(memory, 2)
    grads = torch.autograd.grad(loss, list(wanted.values()))
    return {"y": y, "final": memory} | dict(zip(wanted, grads, strict=True))


def weighed(x, seed):
    weights = torch.randn(x.shape, generator=seeded(seed), dtype=torch.float64)
    return (x * weights.to(x.device, x.dtype)).sum()


def assert_twice_plain(case, inputs, dtype, slack=0.0):
    """At most twice the error of the plain form in the same dtype, against the plain form in fp64."""
    rounded = {
        n: x if x is None or n not in ("q", "k", "v") else x.to(dtype).double()
        for n, x in inputs.items()
    }
    rounded = {n: x if x is None else x.float().double() for n, x in rounded.items()}
    truth = run(case, "parallel", rounded, torch.float64)
    plain, fused = (run(case, form, rounded, dtype) for form in ("parallel", "fused"))
    assert_within_twice(fused, plain, truth, slack)


PLAIN = [
    Case(tokens=9),
    Case(tokens=70, after=True, features=5, values=3, heads=2),
    Case(window=3, tokens=45, batch=2, past=(1, 2)),
    Case(window=4, tokens=30, after=True, decays=False, warm=False),
    Case(window=2, tokens=20, borders=(0, 7, 8, 20)),
    Case(window=6, tokens=21, past=(5,)),
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_parallel_is_the_token_loop(case):
    inputs = draw(case)
    got, wanted = (run(case, form, inputs, torch.float64) for form in ("parallel", "reference"))
    assert_near(got, wanted, 1e-11)


FUSED = [
    Case(tokens=1),
    Case(tokens=63, features=24, values=32, after=True, heads=2),
    Case(tokens=75, features=32, values=24, batch=2),
    Case(tokens=130, decays=False, warm=False),
    Case(window=2, tokens=75, features=24, values=16, batch=2, past=(0, 1)),
    Case(window=2, tokens=33, after=True),
    Case(window=3, tokens=35, values=24, after=True, heads=2),
    Case(window=3, tokens=17, features=32, past=(2,)),
    Case(window=4, tokens=1, past=(3,)),
    Case(window=4, tokens=50, features=24, values=32, batch=2, past=(1, 3)),
    Case(window=4, tokens=18, after=True, decays=False),
]


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_fused_is_the_token_loop(case):
    inputs = draw(case)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 3e-6)


@pytest.mark.parametrize("window", [1, 3])
def test_packed_sequences(window):
    case = Case(window=window, tokens=90, borders=(0, 70, 71, 90), after=window == 1)
    inputs = draw(case)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 3e-6)


@pytest.mark.parametrize("window", [1, 4])
def test_several_blocks_of_features_and_values(window, monkeypatch):
    from atlas_lm.ops.delta_rule import tiles

    narrow = {
        key: found
        if key[0] == "halo_kernel"
        else dataclasses.replace(found, features=16, values=16)
        for key, found in tiles.BLOCKINGS.items()
    }
    monkeypatch.setattr(tiles, "BLOCKINGS", narrow)
    case = Case(window=window, tokens=20, features=40, values=24)
    inputs = draw(case)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 3e-6)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("after", [False, True])
def test_extreme_gates(window, after):
    """Everything forgotten, nothing written, everything kept: exact, and no NaN in any gradient."""
    case = Case(window=window, tokens=40, after=after)
    inputs = draw(case)
    inputs["log_alpha"][:, 3] = -math.inf
    inputs["log_alpha"][:, 20:22] = -math.inf
    inputs["log_alpha"][:, 5:12] = 0.0
    inputs["eta"][:, 7:15] = 0.0
    if window > 1:
        inputs["gamma"][:, 10:, :, 1] = 0.0
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 3e-6)


@pytest.mark.parametrize("window", [1, 2])
def test_one_key_over_and_over_with_full_steps(window):
    """N is all ones below the diagonal: powers of it would grow to 1e18, its inverse is all of size one."""
    case = Case(window=window, tokens=70, decays=False)
    inputs = draw(case, spread=0.0, rate=(1.0, 1.0))
    if window > 1:
        inputs["gamma"] = torch.full_like(inputs["gamma"], 1 / window)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=130, features=32, values=32),
        Case(window=2, tokens=70, features=32, values=32, after=True),
        Case(window=4, tokens=40, features=32, values=32),
    ],
    ids=str,
)
def test_half_precision_is_as_good_as_plain(case):
    """fp16, since Triton's interpreter cannot multiply bf16; bf16 is compared on the device."""
    assert_twice_plain(case, draw(case), torch.float16)


def test_views_are_read_as_they_look():
    case = Case(window=2, tokens=20, heads=2)
    inputs = {n: x if x is None else x.float() for n, x in draw(case).items()}
    views = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    for got, wanted in zip(
        delta_rule(**views, form="fused"), delta_rule(**inputs, form="fused"), strict=True
    ):
        assert torch.equal(got, wanted)


def test_memory_and_gates_may_be_left_out():
    case = Case(tokens=12)
    inputs = draw(case)
    bare = [inputs[name] for name in ("q", "k", "v", "eta")]
    wanted, end = delta_rule(*bare, form="reference")
    got, same = delta_rule(*bare, form="parallel")
    assert distance(got, wanted) < 1e-12
    assert distance(same, end) < 1e-12
    got, same = delta_rule(*(x.float() for x in bare), form="fused")
    assert distance(got, wanted) < 1e-6
    assert distance(same, end) < 1e-6


def test_no_tokens_leave_the_memory_alone():
    case = Case(tokens=0)
    inputs = {n: x if x is None else x.float() for n, x in draw(case).items()}
    for form in ("reference", "parallel", "fused"):
        y, memory = delta_rule(**inputs, form=form)
        assert y.shape == (1, 0, 1, 16)
        assert torch.equal(memory, inputs["memory"])


def test_a_window_of_one_may_have_a_gate():
    case = Case(tokens=20)
    inputs = draw(case)
    inputs["gamma"] = torch.linspace(0, 1, 20, dtype=torch.float64).view(1, 20, 1, 1)
    got = run(case, "fused", inputs, torch.float32)
    assert_near(got, run(case, "reference", inputs, torch.float64), 3e-6)


def test_what_kernels_cannot_hold_is_refused():
    case = Case(window=5, tokens=4, decays=False, warm=False)
    inputs = {n: x if x is None else x.float() for n, x in draw(case).items()}
    words = "no fused form here: the window is 5, kernels hold at most 4; use form='parallel'"
    with pytest.raises(ValueError, match=words):
        delta_rule(**inputs, form="fused")
    y, _ = delta_rule(**inputs, form="auto")
    assert torch.equal(y, delta_rule(**inputs, form="parallel")[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"k": torch.zeros(1, 7, 1, 16), "v": torch.zeros(1, 7, 1, 16)},
            "3 pairs before the first",
        ),
        ({"eta": torch.zeros(1, 4, 2)}, "eta has shape"),
        ({"memory": torch.zeros(2, 1, 16, 16)}, "memory has shape"),
        (
            {"cu_seqlens": torch.tensor([0, 3])},
            "cu_seqlens is .0, 3., wanted rising borders 0, ..., 4",
        ),
        ({"cu_seqlens": torch.tensor([0, 2, 2, 4])}, "none of them empty; cumulate the lengths"),
        ({"form": "fast"}, "form is 'fast', wanted 'auto' or one of fused"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    case = Case(tokens=4, decays=False, warm=False)
    inputs = {n: x if x is None else x.float() for n, x in draw(case).items()}
    with pytest.raises(ValueError, match=words):
        delta_rule(**inputs | change)


DEVICE = [
    Case(tokens=1024, features=128, values=128, batch=2, heads=4),
    Case(tokens=1000, features=128, values=128, batch=2, heads=4, after=True),
    Case(tokens=300, features=64, values=64, batch=2, heads=2, decays=False),
    Case(tokens=300, features=96, values=80, heads=2),
    Case(tokens=200, features=256, values=256, heads=2, after=True),
    Case(tokens=500, features=64, values=128, heads=2, borders=(0, 130, 131, 500)),
    Case(window=2, tokens=500, features=128, values=128, heads=4, past=(1,)),
    Case(window=3, tokens=300, features=128, values=64, batch=2, heads=2, past=(0, 2), after=True),
    Case(window=4, tokens=512, features=128, values=128, batch=2, heads=4),
    Case(window=4, tokens=200, features=153, values=96, heads=2, after=True),
    Case(window=4, tokens=300, features=256, values=256, heads=2, borders=(0, 100, 300)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", DEVICE, ids=str)
def test_on_the_device(case, dtype):
    slack = 1.2e-7 if dtype == torch.float32 else 0.0  # two roundings
    assert_twice_plain(case, draw(case, device="cuda"), dtype, slack)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, 4])
def test_keys_alike_on_the_device(window):
    """Errors far smaller than values: where separate parts of a gradient would cancel."""
    case = Case(window=window, tokens=512, features=128, values=128, batch=2, heads=4)
    assert_twice_plain(case, draw(case, spread=0.3, device="cuda"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, 4])
def test_twice_the_same_on_the_device(window):
    case = Case(window=window, tokens=512, features=128, values=128, batch=2, heads=4)
    inputs = draw(case, device="cuda")
    first, second = (run(case, "fused", inputs, torch.bfloat16) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name
