"""Readers small enough for tests: ours, and models of transformers that stand for others."""

import functools
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from atlas_lm.evaluate.line import Line
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.reader import Reader
from atlas_lm.models import AtlasForCausalLM, configure
from atlas_lm.text import ByteTokenizer
from tests.models.builders import small_config

BYTES = ByteTokenizer.vocab_size
SIZES: dict[str, Any] = dict(
    vocab_size=BYTES,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=ByteTokenizer.eos,
)
KINDS = ("memory", "llama", "mistral")


@functools.cache
def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "memory":
        config = small_config("mag", "titans", vocab_size=BYTES, initializer_range=0.2)
        return AtlasForCausalLM(config).eval()
    if kind == "delta":  # quick: for long texts
        return AtlasForCausalLM(configure("gated_deltanet", initializer_range=0.2)).eval()
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=96)).eval()
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval()


def reader(kind: str, **options: Any) -> Reader:
    return open_reader(model(kind), ByteTokenizer(), name=kind, **({"stride": 16} | options))


def random_line(length: int, seed: int) -> Line:
    random = np.random.RandomState(seed)
    cut = length // 3
    return Line.of(random.randint(0, 256, cut), random.randint(0, 256, length - cut))


def log_probabilities(kind: str, ids: list[int]) -> torch.Tensor:
    """Of every next token [n, V], straight from the model in one call."""
    with torch.no_grad():
        return model(kind)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
