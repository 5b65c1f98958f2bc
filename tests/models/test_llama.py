"""A Transformer configuration of ours and transformers' own Llama give the same logits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atlas_lm.models import AtlasConfig, AtlasForCausalLM
from tests.builders import assert_close
from tests.models.builders import VOCAB, random_ids

OURS = {  # their name of a weight -> ours
    "self_attn.": "mixer.attention.",
    "input_layernorm.": "mixer_norm.",
    "post_attention_layernorm.": "mlp_norm.",
}


def translated(name: str) -> str:
    for theirs, ours in OURS.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients(kv_heads: int, tied: bool) -> None:
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    rope = {"rope_type": "default", "rope_theta": 500.0}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **sizes)).eval()
    ours = AtlasForCausalLM(AtlasConfig(blocks="attention", rope_theta=500.0, **sizes)).eval()
    weights = {translated(name): weight for name, weight in llama.state_dict().items()}
    ours.load_state_dict(weights)  # strict: every weight has its partner
    ids = random_ids(2, 60)
    theirs, mine = llama(ids, labels=ids), ours(ids, labels=ids)
    assert_close("logits", mine.logits, theirs.logits, 2e-5)
    assert_close("loss", mine.loss, theirs.loss, 1e-6)
    theirs.loss.backward()
    mine.loss.backward()
    wanted = {translated(name): p.grad for name, p in llama.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_close(name, parameter.grad, wanted[name], 2e-4)


def test_left_padding_as_llama_does_it() -> None:
    """Llama needs the mask and positions spelled out; ours takes the mask and counts by itself."""
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            num_attention_heads=2,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **sizes,
        )
    ).eval()
    ours = AtlasForCausalLM(AtlasConfig(num_attention_heads=2, **sizes)).eval()
    ours.load_state_dict({translated(n): w for n, w in llama.state_dict().items()})
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    theirs = llama(ids, attention_mask=mask, position_ids=places).logits
    mine = ours(ids, attention_mask=mask).logits
    assert_close("first row", mine[0, 7:], theirs[0, 7:], 1e-5)
    assert_close("second row", mine[1], theirs[1], 1e-5)
