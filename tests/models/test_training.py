"""Training: carried states with full or truncated gradients, checkpointing, packing, labels."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from atlas_lm.models import AtlasCache, AtlasForCausalLM
from tests.builders import assert_close
from tests.models.builders import SHORT, VOCAB, random_ids, small_model

BLOCKS = pytest.mark.parametrize(("block", "rule"), SHORT, ids=str)
CUTS = (0, 8, 9, 24, 30)
LIMIT = 2e-6  # the loss of transformers is computed in fp32


def gradients(model: AtlasForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_close(name, got[name], tensor, limit)


def segment_losses(
    model: AtlasForCausalLM, ids: Tensor, *, truncate: bool, cuts: tuple[int, ...] = CUTS
) -> list[Tensor]:
    """Summed losses of a long text in segments, each predicting across its right border."""
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    cache, losses = AtlasCache(), []
    for start, stop in itertools.pairwise(cuts):
        part = model(
            ids[:, start:stop],
            shift_labels=shifted[:, start:stop],
            past_key_values=cache,
            use_cache=True,
            num_items_in_batch=1,
        )
        losses.append(part.loss)
        cache = cache.detach() if truncate else cache
    return losses


@BLOCKS
def test_segments_with_full_gradients_equal_the_whole(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double().train(), random_ids(2, 30)
    whole = model(ids, labels=ids, num_items_in_batch=1).loss
    wanted = gradients(model, whole)
    parts = torch.stack(segment_losses(model, ids, truncate=False)).sum()
    assert_close("loss", parts, whole, 1e-6)
    assert_same(gradients(model, parts), wanted, LIMIT)


@BLOCKS
def test_truncated_gradients_are_those_of_a_constant_past(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double().train(), random_ids(2, 30)
    losses = segment_losses(model, ids, truncate=True)
    last = gradients(model, losses[-1])
    with torch.no_grad():
        state = model(ids[:, : CUTS[-2]], use_cache=True).past_key_values.state
    logits = model(ids[:, CUTS[-2] :], past_key_values=AtlasCache(state)).logits
    loss = cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, CUTS[-2] + 1 :].flatten(), reduction="sum"
    )
    assert_close("loss", losses[-1], loss, 1e-6)
    assert_same(last, gradients(model, loss), LIMIT)


@BLOCKS
def test_gradient_checkpointing_changes_nothing(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double().train(), random_ids(2, 30)
    wanted = gradients(model, torch.stack(segment_losses(model, ids, truncate=False)).sum())
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    parts = torch.stack(segment_losses(model, ids, truncate=False)).sum()
    assert_same(gradients(model, parts), wanted, 1e-10)


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        small_model().gradient_checkpointing_enable({"use_reentrant": True})


@BLOCKS
def test_packed_sequences_train_as_the_same_ones_apart(block: str, rule: str) -> None:
    """Through the collator of transformers, with borders or with position_ids alone."""
    model = small_model(block, rule).double().train()
    texts = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 14, 1, 9)]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    borders = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    places = DataCollatorWithFlattening()(rows)
    wanted = torch.stack([_summed(model, text) for text in texts if len(text) > 1]).sum()
    truth = gradients(model, wanted)
    for batch in (borders, places):
        loss = model(
            **{n: v for n, v in batch.items() if n != "attention_mask"}, num_items_in_batch=1
        ).loss
        assert_close("loss", loss, wanted, 1e-6)
        assert_same(gradients(model, loss), truth, LIMIT)


def _summed(model: AtlasForCausalLM, text: list[int]) -> Tensor:
    ids = torch.tensor([text])
    return model(ids, labels=ids, num_items_in_batch=1).loss


def test_labels_never_cross_a_border_of_packed_sequences() -> None:
    model, ids = small_model(), random_ids(1, 12)
    borders = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = model(ids, labels=ids, cu_seq_lens_q=borders, num_items_in_batch=1).loss
    apart = [model(p, labels=p, num_items_in_batch=1).loss for p in ids.split([5, 7], dim=1)]
    assert_close("loss", packed, torch.stack(apart).sum(), 1e-5)


def test_rows_that_begin_a_new_document_start_from_the_initial_state() -> None:
    """Training on documents in order: some rows go on, others are put back to the start."""
    for block, rule in SHORT:
        model, ids = small_model(block, rule).double(), random_ids(2, 26)
        state = model(ids[:, :13], use_cache=True).past_key_values.state
        mixed = state.where(torch.tensor([True, False]), model.initial_state(2))
        after = model(ids[:, 13:], past_key_values=AtlasCache(mixed)).logits
        whole, fresh = model(ids[:1]).logits[:, 13:], model(ids[1:, 13:]).logits
        assert_close(f"{block} goes on", after[:1], whole, 1e-10)
        assert_close(f"{block} begins", after[1:], fresh, 1e-10)


@pytest.mark.parametrize(("block", "rule"), [("mag", "atlas"), ("mac", "titans"), ("lmm", "dot")])
def test_a_small_model_learns_a_text_by_heart(block: str, rule: str) -> None:
    model = small_model(block, rule).train()
    ids = random_ids(1, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(ids, labels=ids).loss.item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert first > 0.9 * torch.tensor(VOCAB).log() and loss.item() < 0.3 * first


def test_half_precision_keeps_the_memory_in_fp32() -> None:
    ids = random_ids(2, 30)
    for block, rule in SHORT:
        model = small_model(block, rule)
        with torch.no_grad():
            full = model(ids).logits
            half = model.to(torch.bfloat16)(ids, use_cache=True)
        assert half.logits.dtype == torch.bfloat16
        assert_close(block, half.logits.float(), full, 0.1)
        for layer in half.past_key_values.state.layers:
            memory = {} if layer.memory is None else layer.memory.memory
            assert all(weight.dtype == torch.float32 for weight in memory.values())
