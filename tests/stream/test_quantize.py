"""Memories in few bits: exact integers, small files, and an honest measure of what is lost."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from atlas_lm.models import AtlasCache, AtlasForCausalLM
from atlas_lm.stream.compare import compare_predictions, distances, layer_norms
from atlas_lm.stream.files import open_memory, save_memory
from atlas_lm.stream.header import read_header
from atlas_lm.stream.quantize import LIMITS, fast_weights, pack, quantize, unpack
from atlas_lm.stream.reading import Reading
from tests.models.builders import random_ids, small_model
from tests.stream.mutants import split
from tests.stream.readings import KINDS, assert_equal, read

BITS = (8, 4)
WITH_WEIGHTS = [kind for kind in KINDS if kind[1] in ("titans", "atlas", "omeganet")]


def rows(width: int = 33, seed: int = 0) -> Tensor:
    """Rows of all sizes that fp32 has, a row of zeros, and one of numbers too small for a scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-35, 37, 200).unsqueeze(-1)
    random = torch.rand(200, width, generator=generator) * 2 - 1
    return torch.cat([random * sizes, torch.zeros(1, width), torch.full((1, width), 1e-40)])


@pytest.mark.parametrize("bits", BITS)
class TestPacking:
    def test_the_error_is_half_a_step_at_most(self, bits: int) -> None:
        x = rows()
        packed = pack(x, bits)
        error = (unpack(packed, bits, x.shape[-1]).double() - x.double()).abs()
        step = packed.scale.double().unsqueeze(-1)
        small = step.squeeze(-1) == 0
        assert bool((error <= step / 2 * (1 + 1e-6))[~small].all())
        assert small.sum() == 2 and float(error[small].max()) <= 1e-38

    def test_the_largest_entry_takes_the_whole_range(self, bits: int) -> None:
        x = rows()
        packed = pack(x, bits)
        integers = unpack(packed, bits, x.shape[-1])[:200] / packed.scale[:200].unsqueeze(-1)
        assert torch.equal(integers.abs().amax(-1), torch.full((200,), float(LIMITS[bits])))
        assert torch.equal(integers, integers.round())
        least = (x.abs().amax(-1) / LIMITS[bits])[:200]
        assert bool((packed.scale[:200] >= least * (1 - 2**-23)).all())
        assert bool((packed.scale[:200] <= least * (1 + 2**-15)).all())

    def test_products_are_exact(self, bits: int) -> None:
        """In fp32, so that every reader gets the same numbers."""
        packed = pack(rows(), bits)
        exact = packed.scale.double().unsqueeze(-1) * torch.arange(-LIMITS[bits], LIMITS[bits] + 1)
        assert torch.equal(exact.float().double(), exact)

    @pytest.mark.parametrize("width", [1, 2, 7, 8])
    def test_again_gives_the_same(self, bits: int, width: int) -> None:
        packed = pack(rows(width), bits)
        again = pack(unpack(packed, bits, width), bits)
        assert torch.equal(packed.values, again.values) and torch.equal(packed.scale, again.scale)

    def test_bytes(self, bits: int) -> None:
        packed = pack(rows(width=7), bits)
        assert packed.values.nbytes == 202 * (7 if bits == 8 else 4)
        assert packed.scale.shape == (202,) and packed.scale.dtype == torch.float32

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
    def test_what_has_no_scale_is_refused(self, bits: int, bad: float) -> None:
        x = torch.ones(2, 3)
        x[1, 2] = bad
        with pytest.raises(ValueError, match="cannot be quantised; save it in full"):
            pack(x, bits)


def test_four_bits_lie_as_documented() -> None:
    packed = pack(torch.tensor([[7.0, -7.0, 3.0]]), 4)
    assert packed.values.tolist() == [[15 | 1 << 4, 11 | 8 << 4]] and packed.scale.tolist() == [1.0]


def test_bits_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="bits is 5, wanted 8 or 4"):
        pack(torch.ones(1, 1), 5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("block", "rule"), WITH_WEIGHTS, ids=str)
def test_a_file_holds_the_integers_exactly(
    tmp_path: Path, block: str, rule: str, bits: int
) -> None:
    """quantise, save, open and quantise again: nothing changes any more."""
    model, path = small_model(block, rule), tmp_path / "a.mem"
    reading = read(model)
    small = quantize(reading, bits)
    save_memory(path, model, reading, bits)
    opened = open_memory(path, model)
    assert_equal(opened, small)
    assert_equal(quantize(opened, bits), small)
    _, stored = split(path.read_bytes())
    save_memory(path, model, opened, bits)
    assert split(path.read_bytes())[1] == stored
    assert all(one.error == 0 for one in read_header(path).quantized.values())


@pytest.mark.parametrize("bits", BITS)
def test_only_fast_weights_are_touched(bits: int) -> None:
    reading = read(small_model("mac", "atlas"))
    full, small = reading.state.leaves(), quantize(reading, bits).state.leaves()
    changed = {name for name in full if not torch.equal(full[name], small[name])}
    groups = ("memory.memory.", "memory.anchor.", "memory.momentum.", "tails.start.")
    assert changed == set(fast_weights(reading.state))
    assert all(name.split(".", 2)[2].startswith(groups) for name in changed)


def test_the_header_says_what_was_lost(tmp_path: Path) -> None:
    model, path = small_model("mag", "titans"), tmp_path / "a.mem"
    reading = read(model)
    save_memory(path, model, reading, bits=4)
    header, small = read_header(path), quantize(reading, 4).state.leaves()
    assert header.bits == 4 and set(header.quantized) == set(fast_weights(reading.state))
    for name, one in header.quantized.items():
        given = reading.state.leaves()[name].double()
        error = float((small[name].double() - given).norm() / given.norm())
        assert one.shape == given.shape and one.error == pytest.approx(error, rel=1e-9)
        assert 0.01 < one.error < 0.3


def test_a_memory_without_fast_weights_is_refused(tmp_path: Path) -> None:
    for block, rule in (("lmm", "softmax_attention"), ("sliding", "attention")):
        model = small_model(block, rule)
        with pytest.raises(
            ValueError, match=r"no fast weights to quantise: .*save it without bits"
        ):
            save_memory(tmp_path / "a.mem", model, read(model), bits=8)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def model() -> AtlasForCausalLM:
    return small_model("mag", "titans")


class TestPredictions:
    def log_probabilities(self, model: AtlasForCausalLM, reading: Reading, ids: Tensor) -> Tensor:
        """After each of ids, in one call of the model over pending and new tokens."""
        prompt = torch.cat([reading.pending, ids]).unsqueeze(0)
        with torch.no_grad():
            logits = model(prompt, past_key_values=AtlasCache(reading.state)).logits[0]
        return logits[len(reading.pending) :].double().log_softmax(-1)

    @pytest.mark.parametrize("sizes", [[101], [1] * 101, [64, 0, 37]])
    def test_they_are_those_of_the_whole_text(
        self, model: AtlasForCausalLM, sizes: list[int]
    ) -> None:
        ids = random_ids(1, 101, seed=9)[0]
        first, second = read(model), read(model, 30, seed=2)
        change = compare_predictions(model, first, second, [p.tolist() for p in ids.split(sizes)])
        a, b = (self.log_probabilities(model, one, ids) for one in (first, second))
        kl = kl_div(b, a, reduction="none", log_target=True).sum(-1)
        assert change.tokens == 101
        assert change.mean_kl == pytest.approx(float(kl.mean()), rel=1e-4)
        assert change.max_kl == pytest.approx(float(kl.max()), rel=1e-4)
        losses = [float(cross_entropy(one[:-1], ids[1:])) for one in (a, b)]
        assert [change.first_loss, change.second_loss] == pytest.approx(losses, rel=1e-6)
        assert change.loss_change == pytest.approx(losses[1] - losses[0], abs=1e-6)
        assert change.same_top1 == float((a.argmax(-1) == b.argmax(-1)).double().mean())

    def test_a_memory_does_not_differ_from_itself(self, model: AtlasForCausalLM) -> None:
        reading = read(model)
        change = compare_predictions(model, reading, reading, [random_ids(1, 20)[0].tolist()])
        assert (change.mean_kl, change.max_kl, change.loss_change, change.same_top1) == (0, 0, 0, 1)

    def test_fewer_bits_lose_more(self, model: AtlasForCausalLM) -> None:
        reading, ids = read(model), [random_ids(1, 64, seed=4)[0].tolist()]
        found = [compare_predictions(model, reading, quantize(reading, b), ids) for b in BITS]
        assert 0 < found[0].mean_kl < found[1].mean_kl / 10

    def test_a_broken_memory_is_not_hidden(self, model: AtlasForCausalLM) -> None:
        reading = read(model)
        broken = replace(reading, state=reading.state.clone())
        broken.state.leaves()["layers.0.memory.memory.w0"].fill_(math.nan)
        change = compare_predictions(model, reading, broken, [[1, 2, 3]])
        assert math.isnan(change.mean_kl) and math.isnan(change.max_kl)

    def test_a_text_of_one_token(self, model: AtlasForCausalLM) -> None:
        with pytest.raises(ValueError, match="the text has 1 tokens, wanted 2 or more"):
            compare_predictions(model, read(model), read(model), [[1]])


def test_distances_by_tensor() -> None:
    first = {"layers.10.a": torch.tensor([3.0, 4.0]), "layers.2.a": torch.zeros(2)}
    second = {"layers.10.a": torch.tensor([3.0, 0.0]), "layers.2.a": torch.zeros(2)}
    first |= {"layers.2.b": torch.ones(3), "position": torch.tensor([1])}
    second |= {"layers.2.b": torch.ones(4), "position": torch.tensor([2])}
    wanted = {"layers.2.a": 0.0, "layers.2.b": None, "layers.10.a": 0.8}
    found = distances(first, second)
    assert found == wanted and list(found) == list(wanted)


def test_norms_by_layer() -> None:
    model = small_model(["mag", "attention"], "titans")
    reading, start = read(model), model.initial_state(1).detach().leaves()
    leaves = reading.state.leaves()
    memory, plain = layer_norms(leaves, 2, start)
    names = [name for name in leaves if name.startswith("layers.0.memory.memory.")]
    moved = torch.cat([(leaves[name] - start[name]).view(-1) for name in names])
    assert memory.moved == pytest.approx(float(moved.norm()), rel=1e-6)
    assert memory.memory == pytest.approx(
        float(torch.cat([leaves[name].view(-1) for name in names]).norm()), rel=1e-6
    )
    assert memory.momentum is not None and memory.start is not None
    assert (plain.memory, plain.momentum, plain.moved) == (None, None, None)
    assert memory.bytes + plain.bytes + 8 == reading.state.bytes
