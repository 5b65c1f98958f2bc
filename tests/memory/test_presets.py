"""Every preset equals its paper: both forms against a transcription that shares no code with them."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from atlas_lm.doctor.papers import PAPERS
from atlas_lm.memory import MemorySpec, memorize, presets
from atlas_lm.memory.architectures import Matrix
from atlas_lm.memory.features import Polynomial
from atlas_lm.memory.memorize import Form
from atlas_lm.memory.windows import Window
from tests.builders import gradients, leaf, random_gates, random_inputs, seeded, small_spec, wave

Tensors = dict[str, Tensor]
FORMS: tuple[Form, ...] = ("reference", "parallel")
ROWS, TOKENS = 2, 20
LONG = Window(size=30, gate="offset")  # longer than the stream
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in presets.PRESETS),
    ("deltanet", dict(value_dim=3)),
    ("softmax_attention", dict(key_dim=5)),
    ("titans", dict(value_dim=3)),  # widths differ: no skip
    ("titans_atlas", dict(value_dim=10)),  # as many features as values: the skip is there
    ("atlas_pp", dict(value_dim=10)),
    ("swla", dict(features=Polynomial(degree=3))),
    ("omeganet", dict(features=Polynomial(degree=3))),
    ("omeganet", dict(chunk=3, window=LONG)),
    ("atlas", dict(period=1)),  # Atlas, eq. 32 as printed
    ("atlas", dict(chunk=3, window=Window(size=8, gate="offset"))),  # a window over two borders
    ("lact", dict(period=3)),
    ("titans", dict(chunk=1)),
    ("atlas", dict(chunk=1, period=1)),
    ("swdt_pairs", dict(window=LONG)),
    ("dot_pairs", dict(window=LONG)),
]


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensors
    weights: Tensors

    def leaves(self) -> Tensors:
        return {"q": self.q, "k": self.k, "v": self.v} | self.gates | self.weights


def draw(spec: MemorySpec, tokens: int = TOKENS) -> Given:
    """Random inputs in fp64. Every weight gets noise: no memory starts at zero, no scale at one."""
    generator = seeded(0)
    weights = {
        n: leaf(w.double() + 0.2 * torch.randn(w.shape, generator=generator))
        for n, w in spec.init_weights().items()
    }
    q, k, v = (leaf(x) for x in random_inputs(spec, ROWS, tokens))
    stretch = {"delta": 3}  # Huber's threshold must lie now below the errors, now above
    gates = random_gates(spec, ROWS, tokens)
    gates = {n: leaf(x * stretch.get(n, 1)) for n, x in gates.items()}
    return Given(q, k, v, gates, weights)


def answer(spec: MemorySpec, given: Given, form: Form) -> Tensor:
    q, k, v, gates, weights = given
    return memorize(spec, weights, None, q, k, v, gates, form=form)[0]


def paper(name: str, spec: MemorySpec, given: Given) -> Tensor:
    q, k, v, gates, weights = given
    return PAPERS[name](spec, weights, q, k, v, gates)


def with_gradients(y: Tensor, given: Given) -> Tensors:
    """y, and the gradient of a mixture of all its numbers in every input, gate and weight."""
    grads = gradients(wave(y), given.leaves())
    return {"y": y.detach()} | {f"d {name}": grad for name, grad in grads.items()}


def error(got: Tensors, truth: Tensors) -> tuple[float, str]:
    """The largest relative error over tensors, and the tensor it is in."""
    assert got.keys() == truth.keys()
    return max(
        ((got[n] - truth[n]).abs().max().item() / truth[n].abs().max().item(), n) for n in truth
    )


def forms(spec: MemorySpec) -> tuple[Form, ...]:
    """A deep memory whose slopes follow it token by token has no parallel form; all others do."""
    alone = spec.online and not spec.keeps_pairs and not isinstance(spec.architecture, Matrix)
    return FORMS[:1] if alone else FORMS


def test_every_preset_has_a_paper() -> None:
    assert PAPERS.keys() == presets.PRESETS.keys()


@pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x) or "small"
)
def test_equals_its_paper(name: str, changes: dict[str, Any]) -> None:
    spec = small_spec(name, **changes)
    given = draw(spec)
    truth = with_gradients(paper(name, spec, given), given)
    assert all(tensor.abs().max() > 1e-4 for tensor in truth.values())  # nothing is idle
    for form in forms(spec):
        worst, where = error(with_gradients(answer(spec, given, form), given), truth)
        assert worst <= 1e-9, f"{form} differs by {worst:.1e} in {where}"


def test_atlas_as_the_preset_builds_it() -> None:
    """Chunk 64, window 16, period 16, 153 features, over a chunk border."""
    spec = presets.build("atlas", heads=1, key_dim=20, value_dim=4)
    given = draw(spec, tokens=70)
    truth = paper("atlas", spec, given)
    for form in FORMS:
        assert error({"y": answer(spec, given, form)}, {"y": truth})[0] <= 1e-9


def test_yaad_meets_both_sides_of_its_threshold() -> None:
    spec = small_spec("yaad")
    given = draw(spec)
    slope = gradients(wave(answer(spec, given, "parallel")), given.gates)["delta"]
    below = (slope == 0).double().mean()  # there the threshold has no say
    assert 0.2 < below < 0.8


@pytest.mark.parametrize("form", FORMS)
def test_softmax_attention_is_scaled_dot_product_attention(form: Form) -> None:
    spec = small_spec("softmax_attention", key_dim=6)
    given = draw(spec)
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    truth = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    got = with_gradients(answer(spec, given, form), given)
    assert error(got, with_gradients(truth, given))[0] <= 1e-12


def fla_naive(rule: str) -> ModuleType:
    """fla's plain torch loop for a rule, loaded by path: `import fla` itself wants triton."""
    package = importlib.util.find_spec("fla")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("fla-core is not installed")
    path = Path(package.submodule_search_locations[0], "ops", rule, "naive.py")
    found = importlib.util.spec_from_file_location(f"fla_naive_{rule}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# fla computes in fp32 whatever it is given, so its own rounding over 20 tokens sets this tolerance.
# It scales q by K^-1/2, which is undone below, and wants q and k at unit length from the caller.
FLA_TOLERANCE = 2e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_delta_rules_equal_fla(name: str, form: Form) -> None:
    spec = small_spec(name)
    given = draw(spec)
    q, k, v = normalize(given.q, dim=-1), normalize(given.k, dim=-1), given.v
    q, eta = q * math.sqrt(spec.key_dim), given.gates["eta"]
    start = given.weights["memory.w0"].mT.expand(ROWS, -1, -1, -1)  # fla keeps M^T: [B, H, K, V]
    if name == "deltanet":
        heads_first = (x.transpose(1, 2) for x in (q, k, v, eta))
        truth, _ = fla_naive("delta_rule").delta_rule_recurrence(*heads_first, initial_state=start)
        truth = truth.transpose(1, 2)
    else:
        rule = fla_naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        truth, _ = rule(q, k, v, eta, given.gates["log_alpha"], initial_state=start)
    got = with_gradients(answer(spec, given, form), given)
    worst, where = error(got, with_gradients(truth.double(), given))
    assert worst <= FLA_TOLERANCE, f"differs by {worst:.1e} in {where}"
