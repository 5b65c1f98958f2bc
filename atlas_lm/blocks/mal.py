"""MAL, memory as layer: the memory reads [persistent, x], sliding-window attention reads the memory."""

from torch import Tensor

from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.blocks.persistent import Persistent
from atlas_lm.layers.state import LayerState, inside, outside
from atlas_lm.memory import Trace


class MemoryAsLayer(Mixer):
    """attention(norm(memory([persistent, x]))): chained, so all that attention sees came through memory.

    What the memory says of the persistent tokens opens the window of the attention as other tokens do.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.persistent = Persistent(parts.persistent, parts.width)
        self.memory = parts.memory()
        self.norm = parts.norm()
        self.attention = parts.attention(parts.window)

    def start(self, batch: int, like: Tensor) -> LayerState:
        if len(self.persistent):
            return self._run(self.persistent.rows(batch, like), None, None, None)[1]
        memory, tail = self.memory.start(batch, like)
        tails = outside("attention", self.attention.start(batch, like))
        return LayerState(memory=memory, tails={"conv": tail} | tails)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, LayerState]:
        tokens = x.shape[1]
        if state is None:
            x, count = self.persistent.before(x, count)
        y, after = self._run(x, state, count, watch)
        return y[:, y.shape[1] - tokens :], after

    def _run(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None,
        watch: list[Trace] | None,
    ) -> tuple[Tensor, LayerState]:
        memory, tail, before = None, None, None
        if state is not None:
            memory, tail = state.memory, state.tails["conv"]
            before = inside("attention", state.tails)
        y, memory, tail = self.memory(x, memory, tail, count, watch)
        y, after = self.attention(self.norm(y), before, count)
        return y, LayerState(memory=memory, tails={"conv": tail} | outside("attention", after))
