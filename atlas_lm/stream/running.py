"""What a stream asks of its model: read on, tell the next logits, continue."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atlas_lm.models import AtlasCache, AtlasForCausalLM, StreamState


def read(model: AtlasForCausalLM, state: StreamState, ids: Tensor) -> StreamState:
    """The state after ids [n], n >= 0; logits are not computed."""
    if not len(ids):
        return state
    cache = AtlasCache(state)
    with at_rest(model):
        model.model(ids.unsqueeze(0).to(model.device), past_key_values=cache, use_cache=True)
    assert cache.state is not None
    return settled(cache.state)


def next_logits(model: AtlasForCausalLM, state: StreamState, ids: Tensor) -> Tensor:
    """Logits of the token after ids [n]. [V] fp32"""
    rows = ids.unsqueeze(0).to(model.device)
    with at_rest(model):
        out = model(rows, past_key_values=AtlasCache(state), use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[0, -1].float()
    return logits


def continue_from(
    model: AtlasForCausalLM, state: StreamState, ids: Tensor, options: dict[str, Any]
) -> Tensor:
    """New ids after ids [n], by `generate` of transformers; an eos that ends them is among them.

    Of several beams the best. options: as `generate` takes them.
    """
    beams = torch.zeros(_rows(model, options), dtype=torch.int64, device=model.device)
    rows = ids.unsqueeze(0).to(model.device)
    last = ends(model, options)
    if last and setting(model, options, "pad_token_id") is None:
        options = options | {"pad_token_id": min(last)}
    with at_rest(model):
        out = model.generate(  # type: ignore[misc]
            rows,
            attention_mask=torch.ones_like(rows),
            past_key_values=AtlasCache(state.rows(beams)),
            **options,
        )
    best = (out if isinstance(out, Tensor) else out.sequences)[0, len(ids) :].cpu()
    ended = torch.isin(best, torch.tensor(sorted(last), dtype=torch.int64)).nonzero()
    return best[: int(ended[0]) + 1] if len(ended) else best


def ends(model: AtlasForCausalLM, options: dict[str, Any]) -> set[int]:
    """The ids that end a text."""
    found = setting(model, options, "eos_token_id")
    return set() if found is None else {int(n) for n in torch.as_tensor(found).reshape(-1)}


def setting(model: AtlasForCausalLM, options: dict[str, Any], name: str) -> Any:
    """What `generate` will take for an option, whether it is given or not."""
    settings = options.get("generation_config") or model.generation_config
    return options.get(name, getattr(settings, name))


def settled(state: StreamState) -> StreamState:
    """The state in memory of its own, packed: a view would keep the whole stride alive, and where and how
    values lie can move the rounding of what comes next."""
    return state.map(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format))


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without gradients and in eval mode; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _rows(model: AtlasForCausalLM, options: dict[str, Any]) -> int:
    """Rows that `generate` runs: one, or one per beam."""
    beams = setting(model, options, "num_beams") or 1
    results = setting(model, options, "num_return_sequences") or 1
    if results > beams:
        raise ValueError(
            f"num_return_sequences is {results} with {beams} beams, but a stream has one continuation; fork "
            "it for others"
        )
    return int(beams)
