"""`generate` of transformers on our models: greedy, sampling, beams, padding, prefill in pieces, caches."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from atlas_lm.models import AtlasCache, AtlasForCausalLM
from tests.builders import assert_close
from tests.models.builders import SHORT, VOCAB, random_ids, small_model

BLOCKS = pytest.mark.parametrize(("block", "rule"), SHORT, ids=str)


def greedy_by_hand(model: AtlasForCausalLM, ids: Tensor, new: int) -> Tensor:
    """The whole text anew for every token, no cache."""
    with torch.no_grad():
        for _ in range(new):
            logits = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def beams_by_hand(model: AtlasForCausalLM, ids: Tensor, beams: int, new: int) -> Tensor:
    """Beam search over one row, without cache and without an end token."""
    rows, scores = [ids], [0.0]
    for _ in range(new):
        grown = []
        for row, score in zip(rows, scores, strict=True):
            with torch.no_grad():
                logs = model(row, use_cache=False).logits[0, -1].log_softmax(-1)
            for value, token in zip(*logs.topk(2 * beams), strict=True):
                grown.append((score + value.item(), torch.cat([row, token.view(1, 1)], dim=1)))
        best = sorted(grown, key=lambda pair: -pair[0])[:beams]
        scores, rows = [score for score, _ in best], [row for _, row in best]
    return rows[0]


@BLOCKS
def test_greedy_equals_running_anew(block: str, rule: str) -> None:
    model, ids = small_model(block, rule), random_ids(2, 11)
    made = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(made, greedy_by_hand(model, ids, 12))


@BLOCKS
def test_beams_equal_running_anew(block: str, rule: str) -> None:
    model, ids = small_model(block, rule), random_ids(1, 8)
    made = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
    assert torch.equal(made, beams_by_hand(model, ids, 3, 6))


@BLOCKS
def test_left_padded_batches_equal_single_runs(block: str, rule: str) -> None:
    model = small_model(block, rule)
    prompts = [random_ids(1, n, seed=n) for n in (3, 12, 1, 9)]
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=5) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts]).long()
    made = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    for row, prompt in zip(made, prompts, strict=True):
        alone = model.generate(prompt, max_new_tokens=10, do_sample=False)
        assert torch.equal(row[width:], alone[0, prompt.shape[1] :])


@BLOCKS
def test_sampling_with_a_seed_does_not_depend_on_the_cache(block: str, rule: str) -> None:
    model, ids = small_model(block, rule), random_ids(2, 6)
    made = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        options = dict(max_new_tokens=8, do_sample=True, temperature=1.5, top_k=20)
        made.append(model.generate(ids, use_cache=use_cache, num_return_sequences=2, **options))
    assert made[0].shape == (4, 14)
    assert torch.equal(*made)
    assert not torch.equal(made[0][0], made[0][1])


@BLOCKS
def test_chunked_prefill_and_continued_generation(block: str, rule: str) -> None:
    model, ids = small_model(block, rule), random_ids(2, 23)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    pieces = model.generate(ids, max_new_tokens=8, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(pieces, wanted)
    cache = AtlasCache()
    first = model.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=cache)
    more = model.generate(first, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert torch.equal(more, wanted)


def test_a_cache_made_from_a_state_takes_new_tokens_only() -> None:
    model, ids = small_model("mac", "omeganet"), random_ids(1, 40)
    with torch.no_grad():
        state = model(ids[:, :33], use_cache=True).past_key_values.state
    made = model.generate(
        ids[:, 33:], past_key_values=AtlasCache(state), max_new_tokens=6, do_sample=False
    )
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(made[:, 7:], wanted[:, 40:])


def test_the_cache_is_a_value_that_can_be_kept_forked_and_reset() -> None:
    model, ids = small_model("mag", "atlas"), random_ids(2, 20)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        kept = cache.state
        once = model(ids[:, 9:], past_key_values=cache).logits
        assert cache.get_seq_length() == 20 and int(cache.state.position[0]) == 20
        again = model(ids[:, 9:], past_key_values=AtlasCache(kept)).logits
        assert torch.equal(once, again)
        cache.reset()
        assert cache.get_seq_length() == 0
        fresh = model(ids, past_key_values=cache).logits
        assert torch.equal(fresh, model(ids, use_cache=False).logits)
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(3)
        assert cache.batch_size == 3
        rows = model(ids[:1, :4].expand(3, -1), past_key_values=cache).logits
        assert_close("rows", rows[0], rows[2], 1e-6)


def test_logits_to_keep() -> None:
    model, ids = small_model(), random_ids(2, 15)
    with torch.no_grad():
        full = model(ids).logits
        assert_close("last", model(ids, logits_to_keep=1).logits, full[:, -1:], 1e-6)
        assert_close("last four", model(ids, logits_to_keep=4).logits, full[:, -4:], 1e-6)
        places = torch.tensor([2, 7])
        assert_close("places", model(ids, logits_to_keep=places).logits, full[:, places], 1e-6)


def test_bad_input_gets_a_clear_error() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=rf"token id {VOCAB} at \[0, 2\] is out of range"):
        model(torch.tensor([[1, 2, VOCAB]]))
    with pytest.raises(ValueError, match="token id -1"):
        model.generate(torch.tensor([[-1]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="no tokens"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(TypeError, match="wanted AtlasCache"):
        model(random_ids(1, 3), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="holds 2 streams and the input has 1"):
        model(random_ids(1, 3), past_key_values=AtlasCache(model.initial_state(2)))
    with pytest.raises(TypeError, match="attention_maks"):
        model(random_ids(1, 3), attention_maks=torch.ones(1, 3))
    with pytest.raises(ValueError, match="attention weights are never formed"):
        model(random_ids(1, 3), output_attentions=True)
    with pytest.raises(ValueError, match="counts positions itself"):
        model(random_ids(2, 3), position_ids=torch.arange(3).expand(2, -1))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 2\]"):
        model(random_ids(1, 3), attention_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(random_ids(1, 3), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="rollback"):
        AtlasCache().crop(-1)
    with pytest.raises(ValueError, match="one of the two"):
        model()
