"""The wirings against their equations, typed out as plain loops (docs/mathematics.md, section 7)."""

import pytest
import torch
from torch import Tensor

from atlas_lm.blocks.block import WIRINGS, Block
from atlas_lm.blocks.mac import MemoryAsContext
from atlas_lm.blocks.mag import MemoryAsGate
from atlas_lm.blocks.mal import MemoryAsLayer
from atlas_lm.blocks.mixer import Parts
from atlas_lm.layers.attention import Attention
from atlas_lm.layers.rotary import rotate
from atlas_lm.memory import recall
from atlas_lm.memory.features import unit
from tests.builders import assert_close, small_spec
from tests.layers.test_layers import draw, filled

RULES = pytest.mark.parametrize("rule", ["titans", "atlas", "gated_deltanet"])


def parts(rule: str, **changes: object) -> Parts:
    fields: dict = dict(
        width=8, spec=small_spec(rule), heads=2, kv_heads=2, head_dim=4, window=5, segment=6,
        persistent=3, combine="product", conv_size=4, gate_rank=3, gate_margin=0.0,
        rope_theta=100.0, eps=1e-6,
    )  # fmt: skip
    return Parts(**(fields | changes))


def seen_by(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one query [H, D] to keys and values [n, H, D], projected out."""
    scores = torch.einsum("hd,nhd->hn", q, k) / layer.head_dim**0.5
    return layer.o_proj(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten())


@RULES
def test_mag(rule: str) -> None:
    """norm(sliding attention, which always sees the prefix) * sigmoid(norm(memory of [prefix, x]))."""
    block, x = filled(MemoryAsGate(parts(rule))), draw(2, 19, 8)
    prefix = block.persistent.tokens
    near, _ = block.attention(x, None, None, prefix)
    read, _, _ = block.memory(torch.cat([prefix.expand(2, -1, -1), x], dim=1), None, None)
    wanted = block.attention_norm(near) * torch.sigmoid(block.memory_norm(read[:, 3:]))
    assert_close("mag", block(x, None)[0], wanted, 1e-12)
    summed = filled(MemoryAsGate(parts(rule, combine="sum")))
    assert_close(
        "sum",
        summed(x, None)[0],
        summed.attention_norm(near) + summed.memory_norm(read[:, 3:]),
        1e-12,
    )


@RULES
def test_mal(rule: str) -> None:
    """Sliding attention over what the memory says of [prefix, x]."""
    block, x = filled(MemoryAsLayer(parts(rule))), draw(2, 19, 8)
    whole = torch.cat([block.persistent.tokens.expand(2, -1, -1), x], dim=1)
    read, _, _ = block.memory(whole, None, None)
    wanted, _ = block.attention(block.norm(read), None)
    assert_close("mal", block(x, None)[0], wanted[:, 3:], 1e-12)


@RULES
def test_mac(rule: str) -> None:
    """Segment by segment, token by token."""
    block, x = filled(MemoryAsContext(parts(rule))), draw(1, 20, 8)
    wanted = mac_by_hand(block, x)
    assert_close("mac", block(x, None)[0], wanted, 1e-10)


def mac_by_hand(block: MemoryAsContext, x: Tensor) -> Tensor:
    mixer, layer, size, held = block.memory, block.attention, block.segment, len(block.persistent)
    spec, weights = mixer.spec, mixer.weights()
    # queries for h: linear, causal convolution over the whole stream, SiLU, unit length
    queries = mixer.q_proj(x)
    padded = torch.cat([queries.new_zeros(1, 3, queries.shape[2]), queries], dim=1)
    kernel = mixer.conv.weight[:, : queries.shape[2]]
    mixed = torch.stack([(padded[:, t : t + 4] * kernel).sum(1) for t in range(x.shape[1])], dim=1)
    queries = unit((mixed * mixed.sigmoid()).unflatten(-1, (spec.heads, -1)))
    first_k, first_v = layer.pairs(block.persistent.tokens.unsqueeze(0))
    memory, tail = mixer.start(1, x)
    outputs = []
    for start in range(0, x.shape[1], size):
        before = memory  # from before the segment: h may use nothing newer
        keys = [rotate(first_k, torch.arange(held).unsqueeze(0), layer.rope_theta)[0]]
        values, text_k, text_v = [first_v[0]], [], []
        for t in range(start, min(start + size, x.shape[1])):
            token = x[:, t : t + 1]
            read = recall(spec, weights, before, queries[:, t : t + 1])
            h = mixer._out(token, read)
            place = torch.tensor([[held + t - start]])
            k, v = layer.pairs(block.read_norm(h))
            keys.append(rotate(k, place, layer.rope_theta)[0])
            values.append(v[0])
            q, k, v = layer.project(token)
            q, k = (rotate(one, place + size, layer.rope_theta) for one in (q, k))
            text_k.append(k[0])
            text_v.append(v[0])
            y = seen_by(layer, q[0, 0], torch.cat(keys + text_k), torch.cat(values + text_v))
            said, memory, tail = mixer(block.write_norm(y)[None, None], memory, tail)
            outputs.append(y * torch.sigmoid(said[0, 0]))
    return torch.stack(outputs).unsqueeze(0)


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("persistent", [0, 3])
def test_a_start_is_the_state_before_the_first_token(wiring: str, persistent: int) -> None:
    block = filled(Block(wiring, parts("omeganet", persistent=persistent), 12))
    x = draw(2, 17, 8)
    begun = block(x, block.mixer.start(2, x))
    fresh = block(x, None)
    assert_close("output", begun[0], fresh[0], 1e-12)
    for name, tensor in fresh[1].leaves().items():
        assert_close(name, begun[1].leaves()[name].double(), tensor.double(), 1e-12)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_rows_at_different_places_go_on_as_they_would_alone(wiring: str) -> None:
    """Every pair of lengths up to two segments, then more tokens: no phase is special."""
    block = filled(Block(wiring, parts("omeganet"), 12))
    x, more = draw(1, 13, 8), draw(1, 8, 8, seed=5)
    alone = [block(more, block(x[:, :n], None)[1])[0] for n in range(1, 14)]
    for n in range(1, 14):
        rows = x[:, :13].expand(2, -1, -1)
        _, state = block(rows, None, torch.tensor([n, 14 - n]))
        y, _ = block(more.expand(2, -1, -1), state)
        assert_close(f"{n} tokens", y[0], alone[n - 1][0], 1e-10)
        assert_close(f"{14 - n} tokens", y[1], alone[13 - n][0], 1e-10)
