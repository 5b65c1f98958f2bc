"""What evaluation asks of a model: read on, several rows side by side, and tell the last logits."""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from atlas_lm.models import AtlasCache, AtlasForCausalLM, StreamState
from atlas_lm.stream.running import at_rest, settled

# attention whose reach is bounded, and mixers that keep a state of fixed size
BOUNDED = ("sliding_attention", "chunked_attention", "linear_attention", "hybrid_sliding", "mamba")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


class Session(Protocol):
    """Rows that a model reads side by side."""

    def read(self, ids: Tensor, valid: Tensor | None, keep: int) -> Tensor | None:
        """Read [B, n] more columns. Logits of the last `keep` of them, [B, keep, V]; None for keep = 0.

        valid: [B, n] bool, which ids count; None: all.
        """
        ...

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, in this order, repeats allowed."""
        ...


class AtlasSession:
    """Reads with a state of fixed size; padding anywhere changes nothing."""

    def __init__(self, model: AtlasForCausalLM) -> None:
        self._model = model
        self._state: StreamState | None = None

    def read(self, ids: Tensor, valid: Tensor | None, keep: int) -> Tensor | None:
        cache = AtlasCache(self._state)
        device = self._model.device
        given: dict[str, Any] = {
            "input_ids": ids.to(device),
            "attention_mask": None if valid is None else valid.to(device),
            "past_key_values": cache,
            "use_cache": True,
        }
        logits = None
        with at_rest(self._model):
            if keep:
                logits = self._model(**given, logits_to_keep=keep).logits
            else:
                self._model.model(**given)
        assert cache.state is not None
        self._state = settled(cache.state)
        return logits

    def select(self, rows: list[int]) -> None:
        assert self._state is not None
        self._state = self._state.rows(torch.tensor(rows))


class TransformersSession:
    """Reads with the cache of transformers, whatever that is for the model at hand."""

    def __init__(self, model: Any) -> None:
        self._model = model
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._takes_keep = "logits_to_keep" in taken
        self._cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        self._cache: Any = None
        self._columns = 0  # so far
        self._mask: Tensor | None = None  # [B, columns]; None: all of them count

    def read(self, ids: Tensor, valid: Tensor | None, keep: int) -> Tensor | None:
        given: dict[str, Any] = {"input_ids": ids.to(self._model.device), "use_cache": True}
        given[self._cache_name] = self._cache
        if self._takes_keep:
            given["logits_to_keep"] = max(keep, 1)
        given |= self._places(ids, valid)
        with at_rest(self._model):
            out = self._model(**given)
        self._cache = getattr(out, self._cache_name)
        logits: Tensor = out.logits
        return logits[:, -keep:] if keep else None

    def _places(self, ids: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """The mask over all columns so far and the positions of the new ones, where some do not count."""
        rows, new = ids.shape
        before, self._columns = self._columns, self._columns + new
        if self._mask is None and (valid is None or bool(valid.all())):
            return {}
        known = torch.ones(rows, before, dtype=torch.bool) if self._mask is None else self._mask
        more = torch.ones(rows, new, dtype=torch.bool) if valid is None else valid
        self._mask = torch.cat([known, more], dim=1)
        mask = self._mask.to(self._model.device)
        if not self._takes_positions:
            return {"attention_mask": mask.long()}
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)[:, -new:]
        return {"attention_mask": mask.long(), "position_ids": positions}

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self._cache.batch_select_indices(index.to(self._model.device))
        if self._mask is not None:
            self._mask = self._mask[index]


def longest_context(config: Any) -> int | None:
    """Tokens that a model of transformers can take by its configuration; None: as many as one likes.

    Where every layer looks back a bounded way or keeps a state of fixed size, a text of any length can be
    read piece by piece.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None)
    if kinds and all(kind in BOUNDED for kind in kinds):
        return None
    most = next((int(getattr(config, n)) for n in LENGTHS if getattr(config, n, None)), None)
    window = None if kinds else getattr(config, "sliding_window", None)
    return None if window and (most is None or window < most) else most
