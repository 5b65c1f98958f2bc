"""MAG, memory as gate: sliding-window attention beside a memory, one gating the other."""

import torch
from torch import Tensor

from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.blocks.persistent import Persistent
from atlas_lm.layers.out import OutNorm
from atlas_lm.layers.state import LayerState, inside, outside
from atlas_lm.memory import Trace


class MemoryAsGate(Mixer):
    """norm(attention([persistent, x])) * sigmoid(norm(memory([persistent, x]))), as in Titans.

    Attention always sees the persistent tokens, however far they lie back; the memory has read them
    first. `combine="sum"` is the drawing of the Atlas paper: norm(attention) + norm(memory).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.combine = parts.combine
        self.persistent = Persistent(parts.persistent, parts.width)
        self.attention = parts.attention(parts.window)
        self.memory = parts.memory()
        self.attention_norm = OutNorm(parts.width, parts.eps)
        gates = self.combine == "product"
        self.memory_norm = parts.norm() if gates else OutNorm(parts.width, parts.eps)

    def start(self, batch: int, like: Tensor) -> LayerState:
        if len(self.persistent):
            _, memory, tail = self.memory(self.persistent.rows(batch, like), None, None)
        else:
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
        memory, tail, before = None, None, None
        if state is not None:
            memory, tail = state.memory, state.tails["conv"]
            before = inside("attention", state.tails)
        near, after = self.attention(x, before, count, self.persistent.tokens)
        tokens = x.shape[1]
        if state is None:
            x, count = self.persistent.before(x, count)
        far, memory, tail = self.memory(x, memory, tail, count, watch)
        y = self._join(near, far[:, far.shape[1] - tokens :])
        return y, LayerState(memory=memory, tails={"conv": tail} | outside("attention", after))

    def _join(self, near: Tensor, far: Tensor) -> Tensor:
        near, far = self.attention_norm(near), self.memory_norm(far)
        return near + far if self.combine == "sum" else near * torch.sigmoid(far)
