"""A whole language model under examination: tokens in, logits out."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas_lm.doctor.subjects import Inputs, training_mode
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

    def training(self, mode: bool) -> AbstractContextManager[None]:
        return training_mode(self.model, mode)
