"""A whole language model under examination: tokens in, logits out."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas_lm.doctor.subjects import Inputs
from atlas_lm.models import AtlasCache, AtlasForCausalLM

LETTERS = 64  # ids that the examination uses


@dataclass
class ModelSubject:
    """An AtlasForCausalLM. Tokens come as one-hot rows, so that they have gradients as other inputs do."""

    name: str
    model: AtlasForCausalLM
    dtype: torch.dtype = torch.float32
    length: int = 40
    has_state: bool = True
    has_mask: bool = True
    has_packing: bool = True

    def __post_init__(self) -> None:
        torch.nn.Module.to(self.model, self.dtype)
        self.letters = torch.arange(min(LETTERS, self.model.config.vocab_size))

    def inputs(self, batch: int, tokens: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(self.letters), (batch, tokens), generator=generator)
        return {"x": torch.nn.functional.one_hot(ids, len(self.letters)).to(self.dtype)}

    def weights(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run(
        self,
        x: Inputs,
        state: Any = None,
        valid: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        cache = AtlasCache(state)
        logits = self.model(
            inputs_embeds=x["x"] @ self.model.model.embed_tokens.weight[self.letters],
            attention_mask=valid,
            past_key_values=cache,
            cu_seq_lens_q=cu_seqlens,
        ).logits
        return logits, cache.state

    @contextlib.contextmanager
    def training(self, mode: bool) -> Iterator[None]:
        before = self.model.training
        self.model.train(mode)
        try:
            yield
        finally:
            self.model.train(before)


def load_model(folder: str, dtype: torch.dtype = torch.float32, length: int = 80) -> ModelSubject:
    """A saved model of ours, by its folder."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; pass the folder of a saved model")
    model = AtlasForCausalLM.from_pretrained(folder)
    return ModelSubject(name=Path(folder).name, model=model, dtype=dtype, length=length)
