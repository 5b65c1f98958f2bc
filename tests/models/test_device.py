"""Whole models on a GPU: the CPU's numbers, half precision, generation, compiled training, streams."""

import copy

import pytest
import torch

from atlas_lm.models import AtlasCache, AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream import Stream
from tests.builders import assert_close
from tests.models.builders import KINDS, SHORT, random_ids, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)
def test_logits_state_and_gradients_are_those_of_the_cpu(block: str, rule: str) -> None:
    ids, mask = random_ids(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0
    found = []
    for device in ("cpu", "cuda"):
        model = small_model(block, rule).double().to(device).train()
        cache = AtlasCache()
        model(ids[:, :13].to(device), attention_mask=mask[:, :13].to(device), past_key_values=cache)
        out = model(ids[:, 13:].to(device), past_key_values=cache, labels=ids[:, 13:].to(device))
        out.loss.backward()
        tensors = {"logits": out.logits} | cache.state.leaves()
        tensors |= {f"grad {n}": p.grad for n, p in model.named_parameters()}
        found.append({n: t.detach().cpu().double() for n, t in tensors.items()})
    for name, wanted in found[0].items():
        assert_close(name, found[1][name], wanted, 2e-6 if name.startswith("grad") else 1e-9)


@pytest.mark.parametrize(("block", "rule"), SHORT, ids=str)
def test_generate_on_the_gpu(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double(), random_ids(3, 9)
    wanted = model.generate(ids, max_new_tokens=10, do_sample=False)
    moved = copy.deepcopy(model).cuda()
    made = moved.generate(ids.cuda(), max_new_tokens=10, do_sample=False)
    assert torch.equal(made.cpu(), wanted)
    beams = moved.generate(ids.cuda(), max_new_tokens=5, num_beams=3, do_sample=False)
    truth = model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False)
    assert torch.equal(beams.cpu(), truth)


@pytest.mark.parametrize("preset", ["transformer", "gated_deltanet", "titans", "omeganet", "atlas"])
def test_bf16_training_step_is_near_fp32(preset: str) -> None:
    torch.manual_seed(0)
    block = None if preset == "transformer" else "mag"
    model = AtlasForCausalLM(configure(preset, block=block)).cuda().train()
    ids = torch.randint(256, (4, 200), device="cuda")
    full = model(ids, labels=ids).loss
    with torch.autocast("cuda", torch.bfloat16):
        mixed = model(ids, labels=ids).loss
    mixed.backward()
    assert_close("loss", mixed, full, 5e-3)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    half = copy.deepcopy(model).to(torch.bfloat16)(ids, labels=ids).loss
    assert_close("bf16 weights", half.float(), full, 2e-2)


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # exact products are wanted here
@pytest.mark.parametrize(("block", "rule"), [("mag", "omeganet"), ("lmm", "gated_deltanet")])
def test_compiled_training_on_the_gpu(block: str, rule: str) -> None:
    torch._dynamo.reset()
    model = small_model(block, rule, num_hidden_layers=1).cuda().train()
    ids = random_ids(2, 24).cuda()
    model(ids, labels=ids).loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True)(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, wanted[name], 2e-3)


def test_a_stream_keeps_its_size_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = AtlasForCausalLM(configure("omeganet", block="mag")).cuda().eval()
    stream = Stream(model, stride=512)
    ids = torch.randint(256, (40_000,))
    stream.absorb(ids[:10_000])
    torch.cuda.synchronize()
    early = torch.cuda.memory_allocated()
    stream.absorb(ids[10_000:])
    torch.cuda.synchronize()
    assert stream.tokens == 40_000
    assert abs(torch.cuda.memory_allocated() - early) < 0.02 * early
