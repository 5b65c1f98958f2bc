"""Attention alone: the Transformer, for comparison and for hybrids."""

from torch import Tensor

from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.layers.state import LayerState, inside, outside
from atlas_lm.memory import Trace


class Plain(Mixer):
    """Attention over the whole past, or over a sliding window."""

    def __init__(self, parts: Parts, *, sliding: bool) -> None:
        super().__init__()
        self.attention = parts.attention(parts.window if sliding else None)

    def start(self, batch: int, like: Tensor) -> LayerState:
        return LayerState(tails=outside("attention", self.attention.start(batch, like)))

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, LayerState]:
        before = None if state is None else inside("attention", state.tails)
        y, after = self.attention(x, before, count)
        return y, LayerState(tails=outside("attention", after))
