"""torch.compile takes whole models as one graph, fresh and with a warm state."""

import pytest
import torch

from atlas_lm.models import AtlasCache
from tests.builders import assert_close
from tests.models.builders import SHORT, random_ids, small_model


@pytest.mark.parametrize(("block", "rule"), SHORT, ids=str)
def test_one_graph_and_the_same_numbers(block: str, rule: str) -> None:
    torch._dynamo.reset()
    model, ids = small_model(block, rule, num_hidden_layers=1).double(), random_ids(2, 18)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0

    @torch.no_grad()
    def segment(ids, state, mask):
        cache = AtlasCache(state)
        logits = model(ids, past_key_values=cache, attention_mask=mask).logits
        return logits, cache.state

    traced = torch.compile(segment, backend="eager", fullgraph=True)
    y, state = traced(ids[:, :10], None, None)
    wanted, after = segment(ids[:, :10], None, None)
    assert_close("fresh", y, wanted, 1e-10)
    warm, again = traced(ids[:, 10:], state, mask)[0], segment(ids[:, 10:], after, mask)[0]
    assert_close("warm and padded", warm, again, 1e-10)


def test_training_compiles_whole() -> None:
    torch._dynamo.reset()
    model, ids = (
        small_model("mag", "omeganet", num_hidden_layers=1).double().train(),
        random_ids(2, 8),
    )
    model(ids, labels=ids).loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, wanted[name], 1e-9)
