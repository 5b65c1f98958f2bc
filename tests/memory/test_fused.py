"""`memorize` by kernels: the stream of the reference, the door that chooses, and what it refuses by name."""

import functools
import logging

import pytest
import torch

from atlas_lm.memory import fused, memorize, presets, step
from atlas_lm.memory.architectures import MLP, GatedMLP, Matrix
from atlas_lm.memory.features import Polynomial, Taylor
from atlas_lm.memory.objectives import Huber
from atlas_lm.memory.optimizers import Descent, Momentum, Muon
from atlas_lm.memory.retention import DecayToStart, Renormalise
from atlas_lm.memory.windows import Window
from atlas_lm.ops.backend import SAID
from tests.builders import (
    gradients,
    leaves,
    random_gates,
    random_inputs,
    random_weights,
    seeded,
    wave,
)

pytest.importorskip("triton", reason="the fused form is written in Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ANCHORED = dict(architecture=Matrix(), chunk=16)
DEEP = dict(architecture=MLP(expansion=8), chunk=16)
GATED = dict(architecture=GatedMLP(expansion=8), chunk=16)
SWIGLU = dict(architecture=GatedMLP(expansion=8, activation="silu"), chunk=16)
OFFSET, PAIR, FIXED = (Window(size=4, gate=gate) for gate in ("offset", "pair", "fixed"))
POLYNOMIAL = dict(features=Polynomial(degree=2, project=3), window=OFFSET)  # ten features
AS_MANY_AS_VALUES = Polynomial(degree=2, project=2)
RULES = {
    "titans": ("titans", ANCHORED),
    "features": ("omeganet", ANCHORED | POLYNOMIAL),
    "gated pairs": ("titans", ANCHORED | dict(window=PAIR, retention=DecayToStart())),
    "fixed window": ("titans", ANCHORED | dict(window=FIXED, optimizer=Descent())),
    "swla": ("swla", POLYNOMIAL),
    "linear attention": ("linear_attention", {}),
    "delta": ("gated_deltanet", {}),
    "longhorn": ("longhorn", {}),
    "delta window": (
        "gated_deltanet",
        dict(window=Window(size=3, gate="offset"), retention=DecayToStart()),
    ),
    "deep": ("titans", DEEP),
    "deep, ten features": ("titans_atlas", GATED | POLYNOMIAL | dict(retention=DecayToStart())),
    "deep, skip": ("omeganet", SWIGLU | dict(features=AS_MANY_AS_VALUES, window=PAIR)),
    "deep, Muon": ("atlas_pp", GATED | POLYNOMIAL | dict(retention=DecayToStart(), period=8)),
    "deep, norm": (
        "ttt_mlp",
        dict(architecture=MLP(expansion=8, norm=True), value_dim=8, retention=DecayToStart()),
    ),
    "deep, dot": ("swdt", DEEP | dict(features=Taylor(degree=2, project=3), window=FIXED)),
}
TOKENS, PIECES = 40, (slice(0, 19), slice(19, 20), slice(20, 40))  # cut inside a chunk
ORTHOGONAL = 1e-5  # Newton-Schulz lifts small singular values: plain fp32 is 5.7e-6 off
AMPLITUDES = 4e-6  # their gradient loses digits as they are normed: plain fp32 is 2.5e-6 off


def made(rule, **sizes):
    name, parts = RULES[rule]
    return presets.build(name, **dict(heads=1, key_dim=8, value_dim=6) | parts | sizes)


def padding():
    """Holes anywhere; row 0 sits out the second piece, row 1 the third."""
    valid = torch.rand(2, TOKENS, generator=seeded(5)) > 0.3
    valid[0, PIECES[1]] = valid[1, PIECES[2]] = False
    return valid


def stream(spec, forms, dtype, mode="pieces"):
    """Outputs, state and every gradient of a stream; forms: one for each piece."""
    batch = 2 if mode == "masked" else 1
    q, k, v = random_inputs(spec, batch, TOKENS)
    inputs = dict(q=q, k=k, v=v) | random_gates(spec, batch, TOKENS)
    x = leaves({n: t.to(DEVICE, dtype) for n, t in inputs.items()})
    weights = {n: w.to(DEVICE, dtype) for n, w in random_weights(spec).items()}
    weights = leaves(weights, spec.frozen_weights)
    state, outputs = None, []
    for form, piece, options in zip(forms, *layout(mode), strict=True):
        gates = {n: x[n][:, piece] for n in spec.gates}
        given = (x[n][:, piece] for n in "qkv")
        y, state = memorize(spec, weights, state, *given, gates, form=form, **options)
        outputs.append(y)
    y, after = torch.cat(outputs, dim=1), state.leaves()
    assert y.dtype == dtype
    loss = wave(y.cpu()) + sum(wave(t.cpu()) for n, t in after.items() if n != "position")
    found = {"y": y} | after | {f"d{n}": g for n, g in gradients(loss, x | weights).items()}
    return {n: t.detach().double() for n, t in found.items()}


def layout(mode):
    """The pieces of a stream, and for each what else `memorize` is told."""
    if mode == "packed":  # afresh, and three sequences going on
        borders = [torch.tensor(b, device=DEVICE) for b in ([0, 5, 6, 30], [0, 8, 9, 10])]
        return (slice(0, 30), slice(30, 40)), [dict(cu_seqlens=b) for b in borders]
    if mode == "masked":
        valid = padding().to(DEVICE)
        return PIECES, [dict(valid=valid[:, piece]) for piece in PIECES]
    return PIECES, [{}] * len(PIECES)


def assert_near(got, wanted, tolerance):
    assert got.keys() == wanted.keys()
    assert torch.equal(got["position"], wanted["position"])
    for name in wanted:
        assert got[name].isfinite().all(), f"{name} is not finite"
        error = ((got[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-6)).item()
        allowed = max(tolerance, AMPLITUDES) if name == "dfeatures.amplitudes" else tolerance
        assert error <= allowed, f"{name}: off by {error:.1e}, allowed {allowed:.0e}"


@functools.cache
def truth(rule, mode="pieces"):
    count = len(layout(mode)[0])
    return stream(made(rule), ["reference"] * count, torch.float64, mode)


@pytest.mark.parametrize("mode", ["pieces", "masked", "packed"])
@pytest.mark.parametrize("rule", RULES)
def test_fused_is_the_reference(rule, mode):
    count = len(layout(mode)[0])
    got = stream(made(rule), ["fused"] * count, torch.float32, mode)
    assert_near(got, truth(rule, mode), ORTHOGONAL if "Muon" in rule else 2e-6)


@pytest.mark.parametrize("rule", ["titans", "gated pairs", "delta window", "deep, ten features"])
def test_a_stream_may_change_its_form(rule):
    got = stream(made(rule), ["parallel", "fused", "reference"], torch.float32)
    assert_near(got, truth(rule), 2e-6)
    got = stream(made(rule), ["reference", "parallel", "fused"], torch.float32)
    assert_near(got, truth(rule), 2e-6)


@pytest.mark.parametrize("rule", ["gated pairs", "deep, skip"])
def test_halves_stay_halves(rule):
    got = stream(made(rule), ["fused"] * 3, torch.float16)
    assert_near(got, truth(rule), 6e-3)


def test_heads_and_rows_do_not_meet():
    spec = made("gated pairs", heads=2)
    weights = {n: w.to(DEVICE) for n, w in random_weights(spec, dtype=torch.float32).items()}
    inputs = [x.to(DEVICE) for x in random_inputs(spec, 2, 20, dtype=torch.float32)]
    gates = random_gates(spec, 2, 20, dtype=torch.float32)
    gates = {n: g.to(DEVICE) for n, g in gates.items()}
    y, state = memorize(spec, weights, None, *inputs, gates, form="fused")
    other = [x.clone() for x in inputs]
    for x in other:
        x[1] *= 2
        x[:, :, 1] *= 3
    z, apart = memorize(spec, weights, None, *other, gates, form="fused")
    assert torch.equal(y[0, :, 0], z[0, :, 0]) and not torch.equal(y[1, :, 1], z[1, :, 1])
    assert torch.equal(state.memory["w0"][0, 0], apart.memory["w0"][0, 0])


@pytest.mark.parametrize(
    ("rule", "width"), [("deep", 8), ("deep, ten features", 16), ("deep, skip", 6)]
)
def test_deep_kernels_get_even_rows_of_features(rule, width, monkeypatch):
    """Ten features become sixteen; a skip needs as many as there are values, so they stay."""
    op, widths = fused.mlp_memory.mlp_memory, []

    def seen(q, k, v, eta, memory, **options):
        widths.extend([q.shape[-1], k.shape[-1], memory.w0.shape[-1]])
        return op(q, k, v, eta, memory, **options)

    monkeypatch.setattr(fused.mlp_memory, "mlp_memory", seen)
    spec = made(rule)
    _, state = once(spec, 3, "fused", device=DEVICE)
    assert widths == [width] * 3 and state.memory["w0"].shape[-1] == spec.feature_dim


@pytest.fixture
def calls(monkeypatch):
    """Which of the doors to kernels were taken, in turn."""
    taken = []
    for module, name in ((fused, "run"), (fused, "run_packed"), (step, "run")):
        monkeypatch.setattr(module, name, spy(taken, module, name))
    return taken


def spy(taken, module, name):
    function = getattr(module, name)

    def called(*args, **options):
        taken.append(f"{module.__name__.rpartition('.')[2]}.{name}")
        return function(*args, **options)

    return called


def once(spec, tokens, form, dtype=torch.float32, device="cpu", grad=False, **options):
    weights = {n: w.to(device) for n, w in random_weights(spec, dtype=torch.float32).items()}
    weights = {n: w.requires_grad_(grad) for n, w in weights.items()}
    inputs = [x.to(device, dtype) for x in random_inputs(spec, 1, tokens)]
    gates = {n: g.to(device, dtype) for n, g in random_gates(spec, 1, tokens).items()}
    return memorize(spec, weights, None, *inputs, gates, form=form, **options)


@pytest.mark.parametrize("tokens", [1, 20])
def test_auto_takes_no_kernel_on_the_cpu(tokens, calls):
    spec = made("titans")
    y, _ = once(spec, tokens, "auto")
    assert calls == []
    assert torch.equal(y, once(spec, tokens, "parallel")[0])


REFUSED = {
    "kept pairs": (("softmax_attention", {}), {}, "kept pairs have no weights"),
    "a norm": (("ttt_linear", {}), {}, "a matrix memory with an output norm"),
    "Muon": (("titans", ANCHORED | dict(optimizer=Muon())), {}, "Newton-Schulz"),
    "Muon's momentum": (
        ("titans", dict(optimizer=Muon(carry_per="period"), period=16)),
        {},
        "carried on once per period",
    ),
    "rows renormalised": (("titans", dict(retention=Renormalise())), {}, "renormalised"),
    "Huber": (("titans", ANCHORED | dict(objective=Huber())), {}, "Huber objective"),
    "deep Huber": (("yaad", {}), {}, "Huber objective"),
    "one layer": (
        ("titans", dict(architecture=MLP(depth=1))),
        {},
        "two layers, and this MLP has 1",
    ),
    "three layers": (("titans", dict(architecture=MLP(depth=3))), {}, "this MLP has 3"),
    "deep online": (("titans", dict(chunk=1)), {}, "the online rule (chunk 1) of a deep memory"),
    "a deep short chunk": (("titans", dict(chunk=8)), {}, "and the chunk is 8"),
    "odd hidden units": (
        ("titans", dict(architecture=MLP(expansion=1))),
        {},
        "hidden units in sixteens, got 24",
    ),
    "a deep long window": (
        ("titans", DEEP | dict(window=Window(size=18))),
        {},
        "got 18 at chunk 16",
    ),
    "cut gradients": (
        ("titans", ANCHORED | dict(optimizer=Momentum(truncate=True))),
        {},
        "momentum with cut gradients",
    ),
    "deep cut gradients": (
        ("titans", dict(optimizer=Momentum(truncate=True))),
        {},
        "momentum with cut gradients",
    ),
    "online momentum": (
        ("gated_deltanet", dict(optimizer=Momentum())),
        {},
        "the online rule with momentum",
    ),
    "a long window": (
        ("gated_deltanet", dict(window=Window(size=5, gate="offset"))),
        {},
        "windows up to 4, and the window is 5",
    ),
    "a short chunk": (
        ("titans", ANCHORED | dict(chunk=8)),
        {},
        "chunks of 16, 32, 64 tokens, and the chunk is 8",
    ),
    "many features": (
        ("titans", ANCHORED | dict(features=Polynomial(degree=2, project=23))),
        {},
        "up to 256 features and values",
    ),
    "a trace": (RULES["titans"], dict(trace=True), "kernels keep no trace"),
    "a deep trace": (RULES["deep"], dict(trace=True), "kernels keep no trace"),
    "fp64": (RULES["titans"], dict(dtype=torch.float64), "inputs are fp64"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_kernel_is_refused_with_the_reason(what):
    (name, parts), options, words = REFUSED[what]
    spec = presets.build(name, heads=1, key_dim=24, value_dim=24, **parts)
    with pytest.raises(ValueError, match="no fused form") as caught:
        once(spec, 3, "fused", device=DEVICE, **options)
    assert words in str(caught.value)
    assert "use form='parallel' or 'auto'" in str(caught.value)


def test_a_form_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="form is 'fast', wanted 'auto', 'fused', 'parallel' or"):
        once(made("titans"), 3, "fast")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


PROVEN = [rule for rule in RULES if fused.unproven(made(rule)) is None]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rule", PROVEN)
def test_auto_takes_kernels_on_the_device(rule, calls):
    spec, given = made(rule), dict(form="auto", dtype=torch.bfloat16, device="cuda")
    once(spec, 20, **given)
    once(spec, 20, **given, cu_seqlens=torch.tensor([0, 7, 20], device="cuda"))
    once(spec, 1, **given)
    once(spec, 1, **given, grad=True)
    assert calls == ["fused.run", "fused.run_packed", "step.run", "fused.run"]


@pytest.mark.gpu
@gpu
def test_auto_says_once_what_it_declined(caplog, calls):
    SAID.clear()
    spec = presets.build("yaad", heads=1, key_dim=8, value_dim=8)
    with caplog.at_level(logging.WARNING, logger="atlas_lm"):
        for _ in range(2):
            once(spec, 20, "auto", device="cuda")
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "without kernels" in said[0] and "Huber" in said[0]
    assert calls == []


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rule", RULES)
def test_real_sizes_on_the_device(rule):
    """The parallel form rounds only what comes in and goes out: the bound is one for products of halves."""
    features = dict(features=Polynomial(degree=2, project=16), window=OFFSET)
    name, parts = RULES[rule]
    parts = parts | features if "features" in parts else parts
    parts = parts | dict(chunk=64) if "chunk" in parts else parts
    spec = presets.build(name, heads=4, key_dim=64, value_dim=64, **parts)
    weights = {n: w.cuda() for n, w in spec.init_weights().items()}
    inputs = [x.cuda().bfloat16() for x in random_inputs(spec, 2, 300)]
    gates = {n: g.cuda().bfloat16() for n, g in random_gates(spec, 2, 300).items()}
    exact = {n: w.double() for n, w in weights.items()}, None, *(x.double() for x in inputs)
    truth, end = memorize(spec, *exact, {n: g.double() for n, g in gates.items()}, form="parallel")
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        given = (x.to(dtype) for x in inputs)
        scale = {n: g.to(dtype) for n, g in gates.items()}
        y, state = memorize(spec, weights, None, *given, scale, form="fused")
        found = {"y": y} | state.leaves()
        wanted = {"y": truth} | end.leaves()
        found, wanted = ({n: x.double() for n, x in side.items()} for side in (found, wanted))
        assert_near(found, wanted, tolerance)


@pytest.mark.gpu
@gpu
def test_auto_takes_kernels_for_wide_keys(calls):
    wide = Polynomial(degree=2, project=16)  # 153 features
    spec = presets.build("swla", heads=1, key_dim=16, value_dim=8, features=wide)
    once(spec, 20, "auto", dtype=torch.bfloat16, device="cuda")
    assert calls == ["fused.run"]
