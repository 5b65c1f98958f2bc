"""Low precision, zeros, padding, grad modes and very long streams: no NaN, and the same numbers."""

import contextlib
import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from atlas_lm.memory import memorize, presets, recall
from atlas_lm.memory.optimizers import Descent, Momentum, Muon
from atlas_lm.memory.parallel import declines
from tests.builders import (
    NAMES,
    assert_all_close,
    assert_close,
    assert_finite,
    gradients,
    leaves,
    random_gates,
    random_inputs,
    random_weights,
    small_spec,
    wave,
)

BATCH, TOKENS = 2, 8  # one chunk of six and a bit
FORMS = ("reference", "parallel")


@dataclasses.dataclass
class Stream:
    """Everything that a call of `memorize` reads, by name."""

    spec: object
    inputs: dict
    gates: dict
    weights: dict

    def change(self, **changes):
        """Replace tensors by name, wherever they live: change(k=torch.zeros_like)."""
        other = Stream(self.spec, dict(self.inputs), dict(self.gates), dict(self.weights))
        for name, change in changes.items():
            for group in (other.inputs, other.gates, other.weights):
                for key in [n for n in group if n == name or n.startswith(f"{name}.")]:
                    group[key] = change(group[key])
        return other

    def to(self, dtype):
        groups = (
            {n: x.to(dtype) for n, x in g.items()} for g in (self.inputs, self.gates, self.weights)
        )
        return Stream(self.spec, *groups)

    def run(self, around=None, **options):
        """y, the state's leaves, and the gradient of everything that may have one.

        around: a context for the call alone; the backward pass runs outside, as torch wants it
        """
        inputs, gates = leaves(self.inputs), leaves(self.gates)
        weights = leaves(self.weights, self.spec.frozen_weights)
        with around or contextlib.nullcontext():
            y, state = memorize(self.spec, weights, None, *inputs.values(), gates, **options)
        after = state.leaves()
        loss = wave(y.float() if y.dtype in (torch.float16, torch.bfloat16) else y)
        loss = loss + sum(wave(x) for n, x in after.items() if n != "position" and x.numel())
        found = gradients(loss, inputs | gates | weights)
        return {"y": y, **after}, {f"d {n}": g for n, g in found.items()}


def stream(name, tokens=TOKENS, dtype=torch.float64, **spec_changes):
    spec = small_spec(name, **spec_changes)
    q, k, v = random_inputs(spec, BATCH, tokens, dtype=dtype)
    return Stream(
        spec,
        dict(q=q, k=k, v=v),
        random_gates(spec, BATCH, tokens, dtype=dtype),
        random_weights(spec, dtype=dtype),
    )


def forms(spec):
    return FORMS if declines(spec) is None else FORMS[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_in_and_out_fp32_inside(name, dtype):
    """Rounded inputs give the fp64 result of the same inputs, rounded once more."""
    low = stream(name).to(dtype)
    low.weights = {n: w.float() for n, w in low.weights.items()}
    truth, _ = low.to(torch.float64).run()
    for form in forms(low.spec):
        got, grads = low.run(form=form)
        assert got["y"].dtype == dtype
        assert {x.dtype for n, x in got.items() if n not in ("y", "position")} == {torch.float32}
        assert_finite(got | grads)
        inside = 2e-4  # Newton-Schulz amplifies rounding; the others stay near 1e-6
        assert_close("y", got["y"].double(), truth["y"], inside + 2 * torch.finfo(dtype).eps)
        for n in got.keys() - {"y", "position"}:
            assert_close(n, got[n].double(), truth[n], inside)


DEGENERATE = {
    "zero keys": dict(k=torch.zeros_like),
    "zero values": dict(v=torch.zeros_like),
    "zero queries": dict(q=torch.zeros_like),
    "all zero": dict(q=torch.zeros_like, k=torch.zeros_like, v=torch.zeros_like),
    "eta 0": dict(eta=torch.zeros_like),
    "theta 0": dict(theta=torch.zeros_like),
    "gamma 0": dict(gamma=torch.zeros_like),
    "delta 0": dict(delta=torch.zeros_like),
    "nothing forgotten": dict(log_alpha=torch.zeros_like),
    "all forgotten": dict(log_alpha=lambda x: torch.full_like(x, -torch.inf)),
    "zero memory": dict(memory=torch.zeros_like),
    "zero memory and values": dict(memory=torch.zeros_like, v=torch.zeros_like),
    "one key for all": dict(k=lambda k: k[:, :1].expand_as(k).clone()),
}


def degenerate_cases():
    """The cases that change anything, by preset."""
    for name in NAMES:
        spec = small_spec(name)
        here = {"q", "k", "v", *spec.gates, *(n.split(".")[0] for n in spec.weight_shapes)}
        for case, changes in DEGENERATE.items():
            if changes.keys() <= here:
                yield pytest.param(name, case, id=f"{name}-{case}")


def assert_forms_agree(at, tolerance=1e-9, **options):
    """Finite outputs, states and gradients, the same in both forms."""
    results = [at.run(form=form, **options) for form in forms(at.spec)]
    for outputs, grads in results:
        assert_finite(outputs | grads)
        assert_all_close(outputs, results[0][0], tolerance)
        assert_all_close(grads, results[0][1], tolerance)
    return results[0]


@pytest.mark.parametrize(("name", "case"), list(degenerate_cases()))
def test_degenerate_inputs_give_no_nan(name, case):
    assert_forms_agree(stream(name).change(**DEGENERATE[case]))


@pytest.mark.parametrize("name", NAMES)
def test_one_token_is_enough(name):
    outputs, grads = assert_forms_agree(stream(name, tokens=1))
    assert outputs["position"].tolist() == [1] * BATCH
    assert grads["d v"].abs().max() > 0, "one token is enough to write"


@pytest.mark.parametrize("name", NAMES)
def test_no_valid_token_leaves_everything_as_it_was(name):
    at = stream(name)
    valid = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    outputs, grads = assert_forms_agree(at, valid=valid)
    assert bool((outputs["y"] == 0).all()) and outputs["position"].tolist() == [0] * BATCH
    for n in at.spec.fast_shapes:
        start = at.weights[f"memory.{n}"].expand_as(outputs[f"memory.{n}"])
        assert_close(n, outputs[f"memory.{n}"], start, 1e-12)
    for n in (*at.inputs, *at.gates):
        assert bool((grads[f"d {n}"] == 0).all()), n


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_padding_changes_nothing(name, form):
    at = stream(name)
    if form not in forms(at.spec):
        pytest.fail("every preset has a parallel form")
    valid = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)

    def spoil(x):
        x = x.clone()
        x[~valid] = torch.nan
        return x

    clean, clean_grads = at.run(form=form, valid=valid)
    names = (*at.inputs, *at.gates)
    dirty, dirty_grads = at.change(**dict.fromkeys(names, spoil)).run(form=form, valid=valid)
    assert_all_close(dirty, clean, 0)
    assert_all_close(dirty_grads, clean_grads, 0)
    for n in names:
        assert bool((dirty_grads[f"d {n}"][~valid] == 0).all())
    assert bool((dirty["y"][~valid] == 0).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_around_the_call_changes_nothing(name, form):
    at = stream(name, dtype=torch.float32)
    plain, plain_grads = at.run(form=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    around = torch.autocast("cpu", dtype=torch.bfloat16)
    cast, cast_grads = at.run(around, form=form)
    assert_all_close(cast, plain, 0)
    assert_all_close(cast_grads, plain_grads, 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_grad_mode_changes_nothing(name, form):
    """A memory writes while it is read, with gradients or without: it never falls asleep."""
    at = stream(name, dtype=torch.float32)
    trained, _ = at.run(form=form)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y, state = memorize(at.spec, at.weights, None, *at.inputs.values(), at.gates, form=form)
            assert_all_close({"y": y, **state.leaves()}, trained, 0)
            last = recall(at.spec, at.weights, state, at.inputs["q"][:, -1:])
        assert_close("recall", last, trained["y"][:, -1:], 1e-5)


@pytest.mark.parametrize("optimizer", [Momentum(truncate=True), Muon(truncate=True)])
def test_a_truncated_momentum_changes_gradients_only(optimizer):
    at = stream("titans", tokens=14, optimizer=optimizer)
    outputs, grads = assert_forms_agree(at)
    whole = dataclasses.replace(optimizer, truncate=False)
    outputs_whole, grads_whole = assert_forms_agree(stream("titans", tokens=14, optimizer=whole))
    assert outputs.keys() == outputs_whole.keys()
    for n in outputs:
        assert torch.equal(outputs[n], outputs_whole[n]), n
    assert (grads["d v"][:, :6] - grads_whole["d v"][:, :6]).abs().max() > 1e-6
    assert_close("last chunk", grads["d v"][:, 12:], grads_whole["d v"][:, 12:], 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_softmax_attention_survives_huge_logits(form):
    at = stream("softmax_attention", dtype=torch.float32).change(
        q=lambda q: 300 * q, k=lambda k: 300 * k
    )
    got, grads = at.run(form=form)
    q, k, v = (x.transpose(1, 2).double() for x in at.inputs.values())
    truth = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert_close("y", got["y"].double(), truth, 1e-4)
    assert_finite(grads)


def test_a_closed_gate_keeps_a_value_over_ten_million_tokens():
    """Foreign pairs with step 0 and retention 1: of the value nothing is lost, where 1e-6 might be.

    A segment that leaves the state as it was, to the last bit in all but the clock, does so however often it
    is read. So it is read where the first one ended, and as the last of ten million tokens.
    """
    spec = presets.build(
        "gla", heads=1, key_dim=4, value_dim=4, optimizer=Descent(), chunk=128, period=1
    )
    weights, key = spec.init_weights(), torch.eye(4)[:1].reshape(1, 1, 1, 4)
    value = torch.tensor([0.3, -1.7, 0.01, 123.0]).reshape(1, 1, 1, 4)
    one = dict(eta=torch.ones(1, 1, 1), log_alpha=torch.zeros(1, 1, 1))
    segment, total = 80_000, 10_000_000
    assert segment % spec.timing.chunk == total % segment == 0  # each meets the same borders
    q, k, v = random_inputs(spec, 1, segment, dtype=torch.float32)
    foreign = (q, k, v, {n: torch.zeros(1, segment, 1) for n in one})
    with torch.inference_mode():
        _, state = memorize(spec, weights, None, key, key, value, one, form="parallel")
        assert torch.equal(recall(spec, weights, state, key), value)
        _, state = memorize(spec, weights, state, *foreign, form="parallel", check=False)
        for place in (1 + segment, 1 + total - segment):
            before = dataclasses.replace(state, position=torch.tensor([place]))
            y, after = memorize(spec, weights, before, *foreign, form="parallel", check=False)
            assert_all_close(after.leaves() | {"position": before.position}, before.leaves(), 0)
        assert torch.equal(recall(spec, weights, after, key), value)
    assert after.position.item() == total + 1
    wanted = q[0, :, 0, :1] * value.flatten()  # every read meets that one pair
    assert_close("reads", y[0, :, 0], wanted, 1e-6)
