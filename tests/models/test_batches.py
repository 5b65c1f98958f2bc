"""Batches at the edge: rows without a token, packed sequences that go on, embeddings instead of ids."""

import pytest
import torch

from atlas_lm.models import AtlasCache
from tests.builders import assert_close
from tests.models.builders import KINDS, random_ids, small_model

BLOCKS = pytest.mark.parametrize(("block", "rule"), KINDS, ids=str)


@BLOCKS
@torch.no_grad()
def test_a_row_without_a_token_has_not_begun(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double(), random_ids(2, 25)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0] = 0
    cache = AtlasCache()
    model(ids[:, :12], attention_mask=mask, past_key_values=cache)
    y = model(ids[:, 12:], past_key_values=cache).logits
    assert_close("begins", y[:1], model(ids[:1, 12:]).logits, 1e-10)
    assert_close("goes on", y[1:], model(ids[1:]).logits[:, 12:], 1e-10)


@BLOCKS
@torch.no_grad()
def test_packed_sequences_go_on_packed(block: str, rule: str) -> None:
    model, ids = small_model(block, rule).double(), random_ids(1, 21)
    cache = AtlasCache()
    model(ids[:, :10], cu_seq_lens_q=torch.tensor([0, 4, 10]), past_key_values=cache)
    y = model(ids[:, 10:], cu_seq_lens_q=torch.tensor([0, 5, 11]), past_key_values=cache).logits
    one, two, more, rest = ids.split([4, 6, 5, 6], dim=1)
    first = model(torch.cat([one, more], dim=1)).logits[:, 4:]
    second = model(torch.cat([two, rest], dim=1)).logits[:, 6:]
    assert_close("packed", y, torch.cat([first, second], dim=1), 1e-10)


def test_generation_from_embeddings_is_that_from_their_ids() -> None:
    model, ids = small_model("mac", "titans"), random_ids(2, 9)
    embedded = model.model.embed_tokens(ids)
    made = model.generate(inputs_embeds=embedded, max_new_tokens=6, do_sample=False)
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 9:]
    assert torch.equal(made, wanted)
