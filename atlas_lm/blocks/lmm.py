"""LMM: the memory alone."""

from torch import Tensor

from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.layers.state import LayerState
from atlas_lm.memory import Trace


class MemoryAlone(Mixer):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.memory = parts.memory()

    def start(self, batch: int, like: Tensor) -> LayerState:
        memory, tail = self.memory.start(batch, like)
        return LayerState(memory=memory, tails={"conv": tail})

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, LayerState]:
        memory, tail = (None, None) if state is None else (state.memory, state.tails["conv"])
        y, memory, tail = self.memory(x, memory, tail, count, watch)
        return y, LayerState(memory=memory, tails={"conv": tail})
