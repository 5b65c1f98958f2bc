"""The cache that `generate` carries: a thin face of the model's state, no second truth."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from atlas_lm.models.state import StreamState


class AtlasCache(Cache):
    """Holds one `StreamState`. The model replaces it by the next one; nothing is changed in place, so
    gradients flow through it: call `detach` between segments to truncate them.

    `get_seq_length` counts the columns read through this cache, padding too, as `generate` needs it. A
    cache made from a state starts that count at 0: prompts then hold new tokens only.

    >>> AtlasCache().get_seq_length()
    0
    """

    def __init__(self, state: StreamState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.columns = 0

    def replace(self, state: StreamState, columns: int) -> None:
        """The state after `columns` more columns."""
        self.state = state
        self.columns += columns

    def detach(self) -> "AtlasCache":
        """The same place in the stream, without gradient to what was read before."""
        other = AtlasCache(None if self.state is None else self.state.detach())
        other.columns = self.columns
        return other

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.state is not None

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.batch

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        """Back to the start of a stream, which is the learned initial memory and not zero."""
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            index = torch.arange(self.state.batch, device=self.state.position.device)
            self.state = self.state.rows(index.repeat_interleave(repeats))

    def crop(self, *args: Any) -> None:
        raise NotImplementedError(
            "a memory cannot be cropped: tokens once written are mixed into its weights; keep the state "
            "from before them (it is a value: `cache.state`), or use atlas_lm.stream.Stream.rollback"
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "this cache holds the state of an atlas model as a whole, not keys and values by layer"
        )
