"""The last weights of a branch, whose output is added to the model's stream.

They are classes of their own so that initialisation can find them: it makes them smaller with depth.
"""

from torch import nn

from atlas_lm.layers.norm import RMSNorm


class OutLinear(nn.Linear):
    """A projection onto the stream."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__(inside, width, bias=False)


class OutNorm(RMSNorm):
    """A norm whose output goes onto the stream, undoing any scale of the projections before it."""
