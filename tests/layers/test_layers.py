"""Layers against direct formulas: convolution, rotation, attention, gates, tails."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from atlas_lm.layers.attention import Attention
from atlas_lm.layers.conv import ShortConv
from atlas_lm.layers.gates import Gates
from atlas_lm.layers.memory import MemoryMixer
from atlas_lm.layers.rotary import rotate
from atlas_lm.layers.tail import extend
from atlas_lm.memory import initial_state, memorize, presets
from atlas_lm.memory.defaults import gate_defaults
from atlas_lm.memory.features import unit
from atlas_lm.memory.gates import check_gate_values
from tests.builders import NAMES, assert_close, seeded, small_spec


def filled(module: torch.nn.Module, scale: float = 0.3, seed: int = 0) -> torch.nn.Module:
    """All parameters drawn at random: no zero or one hides an error."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * draw)
    return module.double()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def test_short_convolution_is_the_causal_depthwise_one() -> None:
    conv, x = filled(ShortConv(6, 4)), draw(2, 13, 6)
    weight = conv.weight.T.unsqueeze(1)  # [C, 1, size]
    wanted = conv1d(x.mT, weight, padding=3, groups=6)[..., :13].mT
    (y,), _ = conv((x,), None)
    assert_close("conv", y, silu(wanted), 1e-12)


def test_rotation_depends_on_distance_alone_even_after_ten_million_tokens() -> None:
    q, k = draw(1, 1, 2, 16).float(), draw(1, 1, 2, 16, seed=2).float()

    def score(first: int) -> Tensor:
        place = torch.tensor([[first]])
        return (rotate(q, place + 5, 10000.0) * rotate(k, place, 10000.0)).sum(-1)

    near, far = score(0), score(10_000_000)
    assert_close("score", far, near, 2e-6)
    angle = 3.0 * 10000.0 ** (-2 * 3 / 16)  # dimension pair 3 of 8, position 3
    one = torch.zeros(1, 1, 1, 16)
    one[..., 3] = 1.0
    turned = rotate(one, torch.tensor([[3]]), 10000.0)
    assert_close("cos", turned[0, 0, 0, 3], torch.tensor(math.cos(angle)), 1e-6)
    assert_close("sin", turned[0, 0, 0, 11], torch.tensor(math.sin(angle)), 1e-6)


def naive_attention(layer: Attention, x: Tensor, prefix: Tensor | None) -> Tensor:
    """Token by token, head by head: softmax over what the token may see."""
    rows = []
    groups = layer.heads // layer.kv_heads
    place = torch.arange(x.shape[1]).unsqueeze(0)
    q, k, v = layer.project(x)
    q_turned, k_turned = (rotate(t, place, layer.rope_theta) for t in (q, k))
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            first = 0 if layer.window is None else max(0, t - layer.window + 1)
            heads = []
            for h in range(layer.heads):
                g = h // groups
                scores = k_turned[b, first : t + 1, g] @ q_turned[b, t, h]
                values = v[b, first : t + 1, g]
                if prefix is not None:  # keys without a place meet the query without one
                    p_k, p_v = layer.pairs(prefix.unsqueeze(0))
                    scores = torch.cat([p_k[0, :, g] @ q[b, t, h], scores])
                    values = torch.cat([p_v[0, :, g], values])
                heads.append(torch.softmax(scores / layer.head_dim**0.5, 0) @ values)
            rows.append(layer.o_proj(torch.cat(heads)))
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_softmax_over_what_is_seen(
    window: int | None, prefix: int, kv_heads: int
) -> None:
    layer = filled(
        Attention(12, heads=4, kv_heads=kv_heads, head_dim=6, window=window, rope_theta=100.0)
    )
    x, held = draw(2, 17, 12), draw(prefix, 12, seed=3) if prefix else None
    y, _ = layer(x, None, None, held)
    assert_close("attention", y, naive_attention(layer, x, held), 1e-12)


def test_a_sliding_tail_has_one_size_forever() -> None:
    layer = filled(Attention(8, heads=2, kv_heads=2, head_dim=4, window=6, rope_theta=100.0))
    state, sizes = None, set()
    for tokens in (1, 3, 20, 1):
        _, state = layer(draw(2, tokens, 8), state)
        sizes.add(state["k"].shape)
    assert sizes == {(2, 5, 2, 4)} and state["position"].tolist() == [25, 25]


def test_extend_keeps_the_last_columns_that_count() -> None:
    tail, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0, 0], [7.0, 0, 0]])
    columns, after = extend(tail, x, torch.tensor([2, 1]), keep=2)
    assert columns.shape == (2, 5) and after.tolist() == [[5.0, 6.0], [4.0, 7.0]]
    assert extend(tail, x, None, keep=2)[1].tolist() == [[6.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_gates_start_at_their_defaults_and_never_leave_their_range(
    name: str, margin: float
) -> None:
    spec = small_spec(name)
    gates = Gates(spec, 8, 3, margin)
    starts = gates.starts()
    with torch.no_grad():
        for parameter, value in gates.named_parameters():
            value.fill_(starts.get(parameter, 0.0))
    made = gates(draw(2, 5, 8).float())
    for gate, start in gate_defaults(spec).items():
        wanted = torch.full_like(made[gate], start)
        # gamma starts a little inside its limit 1/c
        assert_close(gate, made[gate], wanted, 0.05 if gate == "gamma" else 1e-5)
    check_gate_values(spec.gates, filled(gates, scale=3.0)(draw(2, 50, 8)))


def test_gates_with_a_margin_close_for_good() -> None:
    """Steps and decays below it are none, the others fall by it; above, gradients flow as without it."""
    spec, x = small_spec("gated_deltanet"), draw(2, 200, 8)
    gates = filled(Gates(spec, 8, 3, 0.1), scale=3.0)
    made = gates(x)
    inner = {name: gates.up[name](gates.down[name](x)) for name in ("eta", "log_alpha")}
    share = (inner["eta"] + gates.eta_bias.squeeze(-1)).sigmoid()
    assert_close("eta", made["eta"], (share - 0.1).clamp_min(0) / 0.9, 1e-12)  # online: 1 at most
    free = (inner["log_alpha"] + gates.log_alpha_bias.squeeze(-1)).exp().log1p()
    assert_close("log_alpha", made["log_alpha"], -(free - 0.1).clamp_min(0), 1e-12)
    for gate in ("eta", "log_alpha"):
        closed = made[gate] == 0
        assert 20 < closed.sum() < closed.numel() - 20
    assert gates.train().opened is None
    gates.priced = True
    assert_close("opened", gates(x)["eta"].mean(), gates.opened, 1e-12)


def test_a_closed_memory_stays_as_it_is() -> None:
    """To the last bit, whatever else is read; with smooth gates the same inputs wear it away."""
    spec, noise = small_spec("gated_deltanet"), draw(1, 2000, 8).abs() + 1
    held = {}
    for margin in (0.0, 0.1):
        mixer = filled(MemoryMixer(spec, 8, conv_size=4, gate_rank=3, gate_margin=margin, eps=1e-6))
        _, before, tail = mixer(draw(1, 30, 8), None, None)
        with torch.no_grad():
            for name in ("eta", "log_alpha"):
                mixer.gates.down[name].weight.fill_(1.0)
                mixer.gates.up[name].weight.fill_(-0.2)  # inputs above 0 close both
                getattr(mixer.gates, f"{name}_bias").fill_(0.0 if name == "eta" else -2.0)
        _, after, _ = mixer(noise, before, tail)
        held[margin] = torch.equal(after.memory["w0"], before.memory["w0"])
    assert held == {0.0: False, 0.1: True}


def test_the_mixer_is_what_the_mathematics_says() -> None:
    """Projections, convolution, SiLU, unit length, memory, norm per head, gate, projection: typed out."""
    spec = small_spec("omeganet")
    mixer = filled(MemoryMixer(spec, 10, conv_size=4, gate_rank=3, eps=1e-6))
    x = draw(2, 15, 10)

    def heads(name: str, first: int, last: int) -> Tensor:
        wide = getattr(mixer, name)(x)
        weight = mixer.conv.weight[:, first:last]
        padded = torch.cat([wide.new_zeros(2, 3, wide.shape[2]), wide], dim=1)
        mixed = torch.stack([(padded[:, t : t + 4] * weight).sum(1) for t in range(15)], dim=1)
        return (mixed * mixed.sigmoid()).unflatten(-1, (spec.heads, -1))

    n = spec.heads * spec.key_dim
    q, k, v = heads("q_proj", 0, n), heads("k_proj", n, 2 * n), heads("v_proj", 2 * n, None)
    weights = mixer.weights()
    y, _ = memorize(spec, weights, None, unit(q), unit(k), v, mixer.gates(x), form="reference")
    normed = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.o_norm.weight
    gate = mixer.g_proj(x)
    wanted = mixer.o_proj(normed.flatten(-2) * gate * gate.sigmoid())
    assert_close("mixer", mixer(x, None, None)[0], wanted, 1e-10)
    state = initial_state(spec, weights, 2, dtype=torch.float64)
    assert_close("start", mixer(x, *mixer.start(2, x))[0], mixer(x, state, None)[0], 1e-12)


def test_keys_of_softmax_attention_keep_their_length() -> None:
    spec = presets.build("softmax_attention", heads=2, key_dim=4, value_dim=4)
    mixer = filled(MemoryMixer(spec, 8, conv_size=4, gate_rank=2, eps=1e-6))
    (q,), _ = filled(mixer).conv((draw(1, 3, 8),), None, units=mixer.units[:1])
    assert q.unflatten(-1, (2, 4)).norm(dim=-1).std() > 0.1
