"""The formulas of cost, against the model that is built."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atlas_lm.memory import presets
from atlas_lm.memory.architectures import MLP, Matrix
from atlas_lm.memory.features import Sketch
from atlas_lm.memory.optimizers import Momentum, Muon
from atlas_lm.memory.retention import DecayToStart
from atlas_lm.memory.windows import Window
from atlas_lm.models.config import AtlasConfig
from atlas_lm.models.counts import flops_per_token, parameters, state_bytes, summary
from atlas_lm.models.modeling import AtlasForCausalLM
from atlas_lm.models.sizes import SIZES, configure

FEW = ("titans", "omeganet", "atlas", "gated_deltanet", "atlas_pp", "dot")
WIRED = {
    "attention": configure("transformer"),
    "sliding": configure("transformer", block="sliding"),
    **{f"lmm {name}": configure(name) for name in presets.PRESETS},
    **{f"{b} {name}": configure(name, block=b) for b in ("mal", "mag", "mac") for name in FEW},
}
DEEP = dict(architecture=MLP(depth=3, expansion=2))
ONLINE = dict(architecture=Matrix(), chunk=1, optimizer=Momentum(), retention=DecayToStart())
VARIANTS = {
    "mixed": configure("titans", block=["mac", "attention", "mag", "lmm"], num_hidden_layers=4),
    "few keys": configure("titans", block="mag", num_key_value_heads=1, head_dim=24),
    "few keys, mac": configure("atlas", block="mac", num_key_value_heads=1, head_dim=24),
    "few keys, mal": configure("dot_pairs", block="mal", num_key_value_heads=1),
    "sum": configure("atlas", block="mag", combine="sum", persistent_tokens=0),
    "no persistent": configure("titans", block="mac", persistent_tokens=0),
    "untied": configure("titans", tie_word_embeddings=False, conv_size=1, gate_rank=3),
    "pairs in mag": configure("dot_pairs", block="mag"),
    "segment and chunk apart": configure("titans", block="mac", segment=12),
    "period and segment apart": configure(
        "atlas", block="mac", segment=7, persistent_tokens=2, num_hidden_layers=1
    ),
    "three layers": configure("omeganet", memory=DEEP),
    "online momentum": configure("titans", memory=ONLINE),
    "online momentum, window": configure("titans", memory=ONLINE | {"window": Window(size=3)}),
    "online deep": configure("titans", memory=dict(chunk=1), num_hidden_layers=1),
    "muon online": configure(
        "atlas", memory=dict(chunk=1, period=1, optimizer=Muon(steps=1)), num_hidden_layers=1
    ),
    "muon every token": configure("atlas_pp", memory=dict(period=1), num_hidden_layers=1),
    "muon without steps": configure("atlas", memory=dict(optimizer=Muon(steps=0))),
    "sketch": configure("titans", memory=dict(features=Sketch(degree=3, sketch=16))),
    "gate of pairs": configure("omeganet", memory=dict(window=Window(size=5, gate="pair"))),
}
ALL = WIRED | VARIANTS


def build(config: AtlasConfig) -> AtlasForCausalLM:
    torch.manual_seed(0)
    return AtlasForCausalLM(config).eval().requires_grad_(False)


def ids(config: AtlasConfig, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, tokens), generator=generator)


@pytest.mark.parametrize("case", ALL)
def test_parameters_are_those_of_the_model(case):
    counted = parameters(ALL[case])
    total = counted.pop("total")
    assert total == sum(counted.values())
    assert total == build(ALL[case]).num_parameters()


def part_of(name: str) -> str:
    """The part that a parameter belongs to, from its name in the model."""
    where = {
        "norm": "norms",
        "persistent": "persistent",
        "embed_tokens": "embedding",
        "lm_head": "head",
        "mlp": "mlp",
        "gates": "gates",
        "attention": "attention",
        "memory": "memory",
    }
    if "weights" in name:  # a memory's own, also those of a norm inside it
        return "memory"
    return next(part for word, part in where.items() if word in name)


@pytest.mark.parametrize("case", ["mixed", "untied", "few keys", "lmm ttt_mlp", "sketch"])
def test_parameters_by_part(case):
    found = dict.fromkeys(parameters(VARIANTS.get(case) or WIRED[case]), 0)
    for name, weight in build(ALL[case]).named_parameters():
        found[part_of(name)] += weight.numel()
        found["total"] += weight.numel()
    assert parameters(ALL[case]) == found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["transformer", "titans lmm", "atlas mag"])
def test_parameters_of_every_named_size(kind, size):
    preset, *block = kind.split()
    config = configure(preset, block=block[0] if block else None, size=size, vocab_size=32000)
    with torch.device("meta"):
        model = AtlasForCausalLM(config)
    assert parameters(config)["total"] == model.num_parameters()


@pytest.mark.parametrize("tokens", [1, 45])
@pytest.mark.parametrize("case", ALL)
def test_state_bytes_are_those_of_the_state(case, tokens):
    config = ALL[case]
    model = build(config)
    state = model(ids(config, tokens), use_cache=True).past_key_values.state
    assert state_bytes(config, tokens) == state.bytes
    assert state_bytes(config) == model.initial_state(1).bytes
    growth = (state.bytes - state_bytes(config)) / tokens
    assert growth == state_bytes(config, 1) - state_bytes(config)
    assert (growth > 0) == (config.grows is not None)


@pytest.mark.parametrize("case", ["mixed", "pairs in mag"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_bytes_in_other_dtypes(case, dtype):
    model = build(ALL[case]).to(dtype)
    state = model(ids(ALL[case], 5), use_cache=True).past_key_values.state
    assert state_bytes(ALL[case], 5, dtype) == state.bytes


def solved(a: list[int], b: list[int], *_: object, **__: object) -> int:
    """A unit-triangular system [..., n, n] with right sides [..., n, V]: n^2 per column."""
    return torch.Size(b).numel() * a[-1]


def measured(config: AtlasConfig, tokens: int) -> dict[str, int]:
    """What the counter of torch sees in a forward pass, attention taken apart into products."""
    model = build(config)
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: solved}
    )
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(ids(config, tokens), use_cache=False)
    by_module = {n: sum(c.values()) for n, c in counter.get_flop_counts().items()}
    found = {"total": by_module["Global"]}
    for part, module in (("head", ".lm_head"), ("mlp", ".mlp"), ("gates", ".memory.gates")):
        found[part] = sum(c for n, c in by_module.items() if n.endswith(module))
    return found


@pytest.mark.parametrize("case", ALL)
def test_flops_are_those_of_a_forward_pass(case):
    """133 tokens: whole ones, and a rest, of every chunk, tile, period, window and segment."""
    config, tokens = ALL[case], 133
    counted, seen = flops_per_token(config, tokens), measured(config, tokens)
    assert counted["total"] == pytest.approx(sum(counted.values()) - counted["total"])
    assert {n: round(tokens * counted[n]) for n in seen} == seen


def test_flops_of_a_long_stream_do_not_depend_on_its_length_unless_it_grows():
    for case in ("lmm titans", "mag atlas", "mac omeganet", "sliding"):
        short, long = (flops_per_token(ALL[case], t)["total"] for t in (2**12, 2**16))
        assert long == pytest.approx(short, rel=0.01), case
    for case in ("attention", "lmm dot_pairs"):
        short, long = (flops_per_token(ALL[case], t)["total"] for t in (2**12, 2**16))
        assert long > 2 * short, case


def test_without_tokens_there_is_no_cost_per_token():
    with pytest.raises(ValueError, match="tokens is 0, wanted 1 or more"):
        flops_per_token(ALL["attention"], 0)


def test_the_summary_says_what_grows():
    assert "and 1.02 kB for every token (full attention)" in summary(ALL["attention"])
    assert "of fixed size" in summary(ALL["mag atlas"])
