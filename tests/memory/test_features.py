"""Feature maps against the kernels that they stand for."""

import math

import pytest
import torch

from atlas_lm.memory import MemorySpec, features
from atlas_lm.memory.features import (
    Elementwise,
    Exponential,
    Identity,
    Polynomial,
    Sketch,
    Taylor,
    Unit,
)
from atlas_lm.ops import backend
from atlas_lm.ops import poly_features as monomials
from tests.builders import (
    assert_all_close,
    assert_close,
    assert_finite,
    gradients,
    leaf,
    leaves,
    seeded,
    wave,
)

HEADS = 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def features_of(part, key_dim=4, heads=HEADS, seed=0):
    """A map x [1, H, n, K] -> [1, H, n, F] in fp64, with freshly made weights."""
    made = part.init(heads, key_dim, seeded(seed))
    weights = {f"features.{n}": w.double() for n, w in made.items()}
    return (lambda x: part(x, weights)), weights


def unit_keys(key_dim=4, heads=HEADS):
    x = draw(1, heads, 6, key_dim), draw(1, heads, 6, key_dim, seed=1)
    return tuple(torch.nn.functional.normalize(part, dim=-1) for part in x)


def series(coefficients, product):
    return sum(c * product**i for i, c in enumerate(coefficients))


def test_unit_features_have_length_one_and_zero_stays_zero():
    x = draw(1, 2, 5, 4)
    x[0, 0, 0] = 0
    phi, _ = features_of(Unit())
    length = phi(x).norm(dim=-1)
    assert length[0, 0, 0] == 0
    assert_close("length", length.flatten()[1:], torch.ones(9, dtype=torch.float64), 1e-12)
    assert_close("direction", phi(3 * x), phi(x), 1e-12)
    point = leaf(x)
    assert_finite(gradients(wave(phi(point)), {"x": point}))


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_kernel(degree):
    """phi(q).phi(k) = sum a_i (q.k)^i / sum a_i with learned amplitudes; unit keys, unit features."""
    phi, weights = features_of(Polynomial(degree=degree))
    amplitudes = 0.2 + draw(HEADS, degree + 1, seed=5).abs()
    weights["features.amplitudes"] = amplitudes
    q, k = unit_keys()
    a = amplitudes.square()
    for h in range(HEADS):
        wanted = series(a[h], (q[:, h] * k[:, h]).sum(-1)) / a[h].sum()
        assert_close("kernel", (phi(q) * phi(k))[:, h].sum(-1), wanted, 1e-12)
    assert_close("length", phi(5 * k).norm(dim=-1), torch.ones(1, HEADS, 6).double(), 1e-12)


def test_polynomial_starts_as_the_exponential_series():
    _, weights = features_of(Polynomial(degree=3))
    a = weights["features.amplitudes"].square()
    wanted = torch.tensor([1, 1, 1 / 2, 1 / 6], dtype=torch.float64).expand(HEADS, -1)
    assert_close("a_i", a, wanted, 1e-6)


@pytest.mark.parametrize("part", [Polynomial(degree=2, project=3), Taylor(degree=2, project=3)])
def test_projection_is_orthonormal_at_first_and_per_head(part):
    phi, weights = features_of(part)
    project = weights["features.project"]  # [H, 3, K]
    eye = torch.eye(3, dtype=torch.float64).expand(HEADS, 3, 3)
    assert_close("rows", project @ project.mT, eye, 1e-6)
    assert (project[0] - project[1]).abs().max() > 0.1
    q, k = unit_keys()
    low = [torch.nn.functional.normalize(x @ project.mT, dim=-1) for x in (q, k)]
    a = [1 / math.factorial(i) for i in range(3)]
    scale = sum(a) if isinstance(part, Polynomial) else 1.0
    wanted = series(a, (low[0] * low[1]).sum(-1)) / scale
    assert_close("kernel", (phi(q) * phi(k)).sum(-1), wanted, 1e-6)
    assert phi(q).shape[-1] == part.width(4)


def test_taylor_approaches_the_exponential():
    q, k = unit_keys()
    product = (q * k).sum(-1)
    errors = []
    for degree in range(1, 7):
        phi, _ = features_of(Taylor(degree=degree))
        errors.append(((phi(q) * phi(k)).sum(-1) - product.exp()).abs().max().item())
        assert errors[-1] < 1.01 * math.e / math.factorial(degree + 1)  # Lagrange's remainder
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_elementwise_is_a_power_series_by_coordinate():
    phi, weights = features_of(Elementwise(degree=3))
    weights["features.amplitudes"] = draw(HEADS, 3, seed=7)
    q, _ = unit_keys()
    for h in range(HEADS):
        c = weights["features.amplitudes"][h]
        wanted = c[0] * q[:, h] + c[1] * q[:, h] ** 2 + c[2] * q[:, h] ** 3
        assert_close("phi", phi(2 * q)[:, h], wanted, 1e-12)


def test_exponential_logits_carry_the_scale():
    x, keys = draw(1, 2, 3, 4), draw(1, 2, 5, 4, seed=1)
    for scale, wanted in ((None, 0.5), (2.0, 2.0)):
        got = Exponential(scale=scale).logits(x, keys)
        assert_close("logits", got, wanted * torch.einsum("bhnk,bhmk->bhnm", x, keys), 1e-13)
    assert_close("unit", Exponential(unit=True)(x, {}).norm(dim=-1), torch.ones(1, 2, 3).double())
    assert torch.equal(Exponential()(x, {}), x)


@pytest.mark.parametrize("degree", [2, 3])
def test_sketch_is_right_on_average(degree):
    """Over many draws the mean of phi(q).phi(k) meets the kernel within a few standard errors."""
    draws = 3000
    phi, _ = features_of(Sketch(degree=degree, sketch=8), heads=draws)
    q, k = (x[:, :1].expand(1, draws, 6, 4) for x in unit_keys(heads=1))
    got = (phi(q) * phi(k)).sum(-1)[0]  # [draws, 6]
    a = [1 / math.factorial(i) for i in range(degree + 1)]
    wanted = series(a, (q * k).sum(-1)[0, 0]) / sum(a)
    standard_error = got.std(0) / math.sqrt(draws)
    assert bool((standard_error > 0).all())
    assert bool(((got.mean(0) - wanted).abs() < 4 * standard_error).all())
    assert standard_error.max() < 0.02, "the test would not see a bias"


def test_a_wider_sketch_is_nearer_to_the_kernel():
    q, k = (x[:, :1].expand(1, 200, 6, 4) for x in unit_keys(heads=1))
    spread = []
    for width in (8, 128):
        phi, _ = features_of(Sketch(degree=2, sketch=width), heads=200)
        spread.append((phi(q) * phi(k)).sum(-1).std(1).max())
    assert spread[1] < 0.5 * spread[0]


def test_sketch_tables_are_weights_that_are_saved_and_not_trained():
    spec = MemorySpec(heads=2, key_dim=4, value_dim=4, features=Sketch(degree=3, sketch=8))
    weights, again, other = spec.init_weights(5), spec.init_weights(5), spec.init_weights(6)
    assert spec.frozen_weights == ("features.tables",)
    assert set(spec.frozen_weights) < set(weights)
    x = draw(1, 2, 6, 4).float()
    assert torch.equal(spec.features(x, weights), spec.features(x, again))
    assert not torch.equal(spec.features(x, weights), spec.features(x, other))
    assert spec.features(x, weights).shape[-1] == spec.feature_dim


@pytest.mark.parametrize("part", [Identity(), Unit(), Polynomial(), Taylor(), Elementwise()])
def test_only_random_constants_are_frozen(part):
    assert part.frozen() == ()


PARTS = [
    Identity(),
    Unit(),
    Polynomial(),
    Polynomial(degree=3),
    Polynomial(project=3),
    Polynomial(degree=4),  # beyond the kernels
    Taylor(),
    Taylor(project=3),
    Elementwise(),
    Sketch(sketch=8),
    Exponential(unit=True),
]


def as_kernels_read_them(part, x, weights, width):
    """Features by the kernels' door, or as they are defined, and every gradient."""
    inputs = leaves({"x": x} | weights, part.frozen())
    outer = {n: w for n, w in inputs.items() if n != "x"}
    if width is None:
        phi = part(inputs["x"].float(), outer).transpose(1, 2)
    else:
        phi = part.fused(inputs["x"], outer, width)
        assert phi.dtype == x.dtype and bool((phi[..., part.width(4) :] == 0).all())
    kept = phi[..., : part.width(4)].double()
    learned = {n: w for n, w in inputs.items() if w.requires_grad}
    return {"phi": kept} | gradients(wave(kept), learned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_what_kernels_read_is_the_map_rounded(part, dtype):
    if not torch.cuda.is_available():
        pytest.importorskip("triton", reason="the fused form is written in Triton")
    weights = {f"features.{n}": w for n, w in part.init(HEADS, 4, seeded(0)).items()}
    x, width = draw(2, HEADS, 5, 4).to(dtype), -(-part.width(4) // 8) * 8
    got = as_kernels_read_them(part, x, weights, width)
    wanted = as_kernels_read_them(part, x, weights, None)
    assert_all_close(got, wanted, 1e-6 if dtype == torch.float32 else 2e-3)
    assert part.fused(x, weights).shape == (2, 5, HEADS, part.width(4))
    with pytest.raises(ValueError, match="does not hold"):
        part.fused(x, weights, part.width(4) - 1)


@pytest.mark.parametrize(
    ("part", "form"),
    [
        (Taylor(), "fused"),
        (Polynomial(), "fused"),
        (Polynomial(project=3), "fused"),
        (Polynomial(degree=4), "parallel"),
    ],
    ids=str,
)
def test_monomials_go_through_kernels_where_there_are_some(part, form, monkeypatch, caplog):
    if not torch.cuda.is_available():
        pytest.importorskip("triton", reason="the fused form is written in Triton")
    seen = []

    def look(*given, **words):
        seen.append(words["form"])
        return monomials.poly_features(*given, **words)

    monkeypatch.setattr(features, "poly_features", look)
    monkeypatch.setattr(backend, "SAID", set())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = part.init(HEADS, 4, seeded(0))
    weights = {f"features.{n}": w.to(device) for n, w in weights.items()}
    for _ in range(2):
        part.fused(torch.ones(1, HEADS, 3, 4, device=device), weights)
    assert seen == [form] * 2
    said = ["poly_features runs its parallel form: degree is 4, kernels take 1 to 3"]
    assert caplog.messages == ([] if form == "fused" else said)
