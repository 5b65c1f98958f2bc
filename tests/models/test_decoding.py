"""Decoding token by token: packed steps and graphs give what the model gives."""

import copy
import functools
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from atlas_lm.models import AtlasForCausalLM, configure
from atlas_lm.models.decoding import Decoder, Steps
from tests.builders import assert_all_close, assert_close
from tests.models.builders import VOCAB, random_ids, small_model

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
on_cpu = pytest.mark.skipif(GPU, reason="the interpreter runs where there is no GPU")


def seconds_per_step(decoder: Decoder, steps: int = 50, warm: int = 10) -> float:
    """Mean time of a step on the GPU, each fed with the likeliest token of the one before."""
    ids = torch.zeros(decoder.batch, dtype=torch.int64, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(warm + steps):
        if i == warm:
            start.record()
        ids = decoder.step(ids).argmax(-1)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / steps


def test_plain_decoding_is_the_model() -> None:
    model, ids = small_model("mag", "titans"), random_ids(2, 6)
    decoder = Decoder(model, model.initial_state(2), form="plain")
    logits = torch.stack([decoder.step(ids[:, t]) for t in range(6)], dim=1)
    assert_close("logits", logits, model(ids).logits, 1e-5)
    assert decoder.state.position.tolist() == [6, 6]


@on_cpu
@pytest.mark.parametrize("rule", ["titans", "omeganet", "gated_deltanet"])
def test_packed_steps_are_the_model(rule: str) -> None:
    model, ids = small_model("lmm", rule), random_ids(2, 10)
    with torch.no_grad():
        _, state = model.model.read(model.model.embed_tokens(ids[:, :3]), model.initial_state(2))
    plain, packed = (Decoder(model, state, form=form) for form in ("plain", "steps"))
    for t in range(3, 10):
        assert_close(f"token {t}", packed.step(ids[:, t]), plain.step(ids[:, t]), 1e-5)
    assert_all_close(packed.state.leaves(), plain.state.leaves(), 1e-5)


@on_cpu
def test_the_state_is_a_value_and_can_be_gone_back_to() -> None:
    model, ids = small_model("lmm", "titans", num_hidden_layers=1), random_ids(2, 4)
    decoder = Decoder(model, model.initial_state(2), form="steps")
    decoder.step(ids[:, 0])
    kept = decoder.state
    again = {n: t.clone() for n, t in kept.leaves().items()}
    first = [decoder.step(ids[:, t]).clone() for t in (1, 2, 3)]
    for name, tensor in kept.leaves().items():
        assert torch.equal(tensor, again[name]), name
    decoder.reset(kept)
    for t, wanted in zip((1, 2, 3), first, strict=True):
        assert torch.equal(decoder.step(ids[:, t]), wanted)


@on_cpu
def test_packed_steps_in_bf16_are_as_near_to_fp32_as_the_model() -> None:
    model, ids = small_model("lmm", "titans", num_hidden_layers=1), random_ids(2, 8)
    exact = Decoder(model, model.initial_state(2), form="plain")
    truth = torch.stack([exact.step(ids[:, t]) for t in range(8)])
    half, errors = copy.deepcopy(model).bfloat16(), []
    for form in ("plain", "steps"):
        decoder = Decoder(half, half.initial_state(2), form=form)
        logits = torch.stack([decoder.step(ids[:, t]) for t in range(8)])
        errors.append((logits - truth).norm() / truth.norm())
    assert errors[1] <= 2 * errors[0]


@on_cpu
@pytest.mark.parametrize(("rule", "graphs"), [("titans", 3), ("omeganet", 4)])
def test_few_functions_are_compiled_for_all_layers(rule: str, graphs: int) -> None:
    """Into the first memory, from each to the next, out of the last; features that need more."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, ids = small_model("lmm", rule, num_hidden_layers=4).bfloat16(), random_ids(2, 2)
    plain, packed = (Decoder(model, model.initial_state(2), form=f) for f in ("plain", "steps"))
    packed._steps = Steps(
        model, functools.partial(torch.compile, backend=counter, fullgraph=True, dynamic=False)
    )
    for t in range(2):
        assert_close("logits", packed.step(ids[:, t]), plain.step(ids[:, t]), 3e-2)
    assert counter.frame_count == graphs


def test_a_model_without_a_head_gives_hidden_states() -> None:
    model, ids = small_model("lmm", "gated_deltanet"), random_ids(2, 1)[:, 0]
    for form in ("plain",) if GPU else ("plain", "steps"):
        decoder = Decoder(model.model, model.initial_state(2), form=form)
        whole = Decoder(model, model.initial_state(2), form=form)
        assert_close(form, model.lm_head(decoder.step(ids)), whole.step(ids), 1e-6)


def test_what_cannot_be_packed_says_why(caplog: pytest.LogCaptureFixture) -> None:
    mag = small_model("mag", "titans")
    if not GPU:
        with pytest.raises(ValueError, match="this model has mag"):
            Decoder(mag, mag.initial_state(1), form="steps")
        muon = small_model("lmm", "atlas")
        with pytest.raises(ValueError, match="Newton-Schulz"):
            Decoder(muon, muon.initial_state(1), form="steps")
        lmm = small_model("lmm", "titans")
        with pytest.raises(ValueError, match="CUDA"):
            Decoder(lmm, lmm.initial_state(1), form="graphs")
        assert Decoder(lmm, lmm.initial_state(1)).form == "plain"
    with pytest.raises(ValueError, match="wanted 'auto'"):
        Decoder(mag, mag.initial_state(1), form="fast")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "atlas_lm"):
        decoder = Decoder(mag, mag.initial_state(1))
    assert not caplog.records  # on a CPU nothing is lost
    with pytest.raises(ValueError, match="one token per row"):
        decoder.step(random_ids(2, 1))


def test_bytes_of_a_step() -> None:
    model = small_model("lmm", "titans")
    state = model.initial_state(3)
    decoder = Decoder(model, state, form="plain")
    weights = sum(p.numel() * 4 for p in model.parameters())
    anchors = sum(t.numel() * 4 for n, t in state.leaves().items() if ".anchor." in n)
    assert decoder.bytes_per_step == weights + 2 * state.bytes - anchors


class TestGraphs:
    pytestmark = on_gpu

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("preset", ["titans", "omeganet", "gated_deltanet"])
    def test_replays_are_the_model(self, preset: str, compiled: bool) -> None:
        """A hundred replays, from the middle of a chunk, against the model over all tokens at once."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = AtlasForCausalLM(configure(preset, size="20M", num_hidden_layers=3)).cuda().eval()
        ids = torch.randint(259, (4, 130), device="cuda")
        with torch.no_grad():
            wanted = model(ids).logits[:, 30:]
            embedded = model.model.embed_tokens(ids[:, :30])
            _, state = model.model.read(embedded, model.initial_state(4))
        decoder = Decoder(model, state, form="graphs", compiled=compiled)
        logits = torch.stack([decoder.step(ids[:, t]).clone() for t in range(30, 130)], dim=1)
        assert_close("logits", logits, wanted, 2e-3)
        assert decoder.state.position.tolist() == [130] * 4

    def test_replays_are_the_steps_in_bf16(self) -> None:
        torch.manual_seed(0)
        model = AtlasForCausalLM(configure("titans", size="340M", num_hidden_layers=2))
        model = model.cuda().bfloat16().eval()
        ids = torch.randint(VOCAB, (64, 70), device="cuda")
        state = model.initial_state(64)
        launched = Decoder(model, state, form="steps")
        replayed = Decoder(model, state, form="graphs", compiled=False)
        joined = Decoder(model, state, form="graphs", compiled=True)
        for t in range(70):
            wanted = launched.step(ids[:, t])
            assert torch.equal(replayed.step(ids[:, t]), wanted)
            assert_close("compiled", joined.step(ids[:, t]).float(), wanted.float(), 5e-2)
        for name, tensor in launched.state.leaves().items():
            assert torch.equal(replayed.state.leaves()[name], tensor), name
