"""Small models for the tests: a short text crosses many chunks, windows and segments."""

from typing import Any

import torch
from torch import Tensor

from atlas_lm.doctor.subjects import small_spec
from atlas_lm.models import AtlasConfig, AtlasForCausalLM

RULES = ("titans", "omeganet", "atlas", "gated_deltanet")
WITH_MEMORY = ("lmm", "mal", "mag", "mac")
KINDS = [  # every block x every rule that the laws are held to
    ("attention", "attention"),
    ("sliding", "attention"),
    *((block, rule) for block in WITH_MEMORY for rule in RULES),
]
SHORT = [  # one of each block, the rules spread over them
    ("attention", "attention"),
    ("sliding", "attention"),
    ("lmm", "titans"),
    ("mal", "omeganet"),
    ("mag", "atlas"),
    ("mac", "gated_deltanet"),
]
VOCAB = 40


def small_config(block: str | list[str], rule: str, **changes: Any) -> AtlasConfig:
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        blocks=block,
        memory=None if rule == "attention" else small_spec(rule),
        sliding_window=7,
        segment=9,
        persistent_tokens=2 if block in ("mal", "mag", "mac") else 0,
        gate_rank=4,
        initializer_range=0.1,
    )
    return AtlasConfig(**(fields | changes))


def small_model(
    block: str | list[str] = "mag", rule: str = "titans", seed: int = 0, **changes: Any
) -> AtlasForCausalLM:
    torch.manual_seed(seed)
    return AtlasForCausalLM(small_config(block, rule, **changes)).eval()


def random_ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (batch, tokens), generator=generator)
