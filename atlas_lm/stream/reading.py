"""Where one stream stands, as a value."""

from dataclasses import dataclass

from torch import Tensor

from atlas_lm.models.state import StreamState


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A model's state at the last border of a stride, and the tokens that came after it.

    What is remembered is always computed in whole strides at the same places of the stream, so results
    are the same to the last bit, however the tokens were handed over; the rest waits in `pending`. A full
    stride waits until more comes: the last token is always at hand, to go on from.
    """

    state: StreamState  # one row
    pending: Tensor  # [n] int64 on the CPU, 1 <= n <= stride; 0 before the first token
    stride: int  # tokens per call of the model

    @property
    def tokens(self) -> int:
        """Tokens read so far, pending ones too."""
        return int(self.state.position[0]) + len(self.pending)
