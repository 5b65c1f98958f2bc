"""The record of a text: the numbers of the memory itself, whatever way the text was read."""

import json
import math

import pytest
import torch
from torch import Tensor

from atlas_lm.memory import memorize
from atlas_lm.models.modeling import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream.reading import Reading
from atlas_lm.watch import observe

TEXT = torch.tensor(list(b"To be, or not to be, that is the question: to be, to be."))


def build(preset: str, **options) -> AtlasForCausalLM:
    torch.manual_seed(0)
    return AtlasForCausalLM(configure(preset, **options)).eval()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-6, equal_nan=True)


def by_hand(model: AtlasForCausalLM, ids: Tensor):
    """The trace of the first block's memory, from its parts."""
    block = model.model.layers[0]
    mixer = block.mixer.memory
    with torch.no_grad():
        x = block.mixer_norm(model.model.embed_tokens(ids.unsqueeze(0)))
        parts, _ = mixer.conv((mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)), None)
        q, k, v = (part.unflatten(-1, (mixer.spec.heads, -1)) for part in parts)
        weights, gates = mixer.weights(), mixer.gates(x)
        return memorize(mixer.spec, weights, None, q, k, v, gates, trace=True)[2]


def test_the_numbers_are_those_of_the_memory():
    """Titans has unit features, so its keys need no care here."""
    model = build("titans", num_hidden_layers=1)
    seen, trace = observe(model, TEXT).layers[0].seen, by_hand(model, TEXT)
    write = trace.gates["eta"] * trace.surprise
    close(seen["surprise"], trace.surprise[0].mean(-1))
    close(seen["surprise_max"], trace.surprise[0].amax(-1))
    close(seen["write"], write[0].mean(-1))
    close(seen["write_max"], write[0].amax(-1))
    close(seen["retention"], trace.gates["alpha"][0].mean(-1))
    close(seen["memory"], trace.memory_norm[0].mean(-1))
    close(seen["momentum"], trace.momentum_norm[0].mean(-1))


def test_a_fixed_and_an_implicit_step_count_as_they_are_taken():
    fixed = observe(build("linear_attention"), TEXT).layers[0].seen
    assert torch.equal(fixed["write"], fixed["surprise"])  # its step is 1
    assert "retention" not in fixed and "momentum" not in fixed
    model = build("longhorn", num_hidden_layers=1)
    seen, trace = observe(model, TEXT).layers[0].seen, by_hand(model, TEXT)
    eta = trace.gates["eta"] / (1 + trace.gates["eta"])
    close(seen["write"], (eta * trace.surprise)[0].mean(-1))


def test_the_loss_is_that_of_the_model():
    model = build("titans", block="mag")
    loss = observe(model, TEXT, stride=10).loss
    assert math.isnan(loss[0])
    wanted = model(TEXT.unsqueeze(0), labels=TEXT.unsqueeze(0)).loss
    close(loss[1:].mean(), wanted.detach())


@pytest.mark.parametrize(
    ("preset", "block"),
    [
        ("titans", "lmm"),
        ("titans", "mal"),
        ("atlas", "mag"),
        ("omeganet", "mac"),
        ("dot_pairs", "mag"),
        ("gated_deltanet", ["mac", "attention"]),
    ],
)
def test_the_stride_changes_nothing(preset, block):
    model = build(preset, block=block, segment=12)
    whole = observe(model, TEXT, stride=1000)
    assert all(len(values) == len(TEXT) for one in whole.layers for values in one.seen.values())
    for stride in (7, 16):
        cut = observe(model, TEXT, stride=stride)
        close(cut.loss, whole.loss)
        for got, wanted in zip(cut.layers, whole.layers, strict=True):
            assert got.seen.keys() == wanted.seen.keys()
            for name in wanted.seen:
                close(got.seen[name], wanted.seen[name])


def test_a_block_without_a_memory_is_empty():
    record = observe(build("titans", block=["lmm", "sliding"]), TEXT)
    assert [one.wiring for one in record.layers] == ["lmm", "sliding"]
    assert record.layers[1].seen == {}


def test_a_reading_is_continued_and_left_alone():
    """34 tokens before, of which two wait: the record of the rest is that of the whole text."""
    model = build("atlas", block="mag")
    whole = observe(model, TEXT, stride=16)
    before = model(TEXT[None, :32], use_cache=True).past_key_values.state
    reading = Reading(state=before, pending=TEXT[32:34], stride=16)
    kept = {name: leaf.clone() for name, leaf in before.leaves().items()}
    rest = observe(model, TEXT[34:], reading=reading)
    assert rest.start == 34 and whole.start == 0
    close(rest.loss, whole.loss[34:])
    for got, wanted in zip(rest.layers, whole.layers, strict=True):
        for name in wanted.seen:
            close(got.seen[name], wanted.seen[name][34:])
    assert all(torch.equal(kept[name], leaf) for name, leaf in before.leaves().items())


def test_progress_is_told():
    told: list[int] = []
    observe(build("titans"), TEXT, stride=20, advance=told.append)
    assert told == [20, 20, 16]


def test_a_record_is_plain_json():
    record = observe(build("titans"), TEXT[:5])
    plain = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert plain["ids"] == TEXT[:5].tolist() and plain["loss"][0] is None
    assert plain["layers"][0]["wiring"] == "lmm"
    close(torch.tensor(plain["layers"][1]["surprise"]), record.layers[1].seen["surprise"])


def test_refusals():
    with pytest.raises(ValueError, match=r"no memory to watch, its blocks are \['attention'\]"):
        observe(build("transformer"), TEXT)
    with pytest.raises(ValueError, match=r"ids have shape \[0\]"):
        observe(build("titans"), TEXT[:0])
    with pytest.raises(ValueError, match="token id 900 at"):
        observe(build("titans"), torch.tensor([1, 900]))
