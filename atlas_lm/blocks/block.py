"""The residual block around every wiring, and the table of wirings."""

from collections.abc import Callable

from torch import Tensor, nn

from atlas_lm.blocks.lmm import MemoryAlone
from atlas_lm.blocks.mac import MemoryAsContext
from atlas_lm.blocks.mag import MemoryAsGate
from atlas_lm.blocks.mal import MemoryAsLayer
from atlas_lm.blocks.mixer import Mixer, Parts
from atlas_lm.blocks.plain import Plain
from atlas_lm.layers.mlp import SwiGLU
from atlas_lm.layers.state import LayerState
from atlas_lm.memory import Trace

WIRINGS: dict[str, Callable[[Parts], Mixer]] = {
    "attention": lambda parts: Plain(parts, sliding=False),
    "sliding": lambda parts: Plain(parts, sliding=True),
    "lmm": MemoryAlone,
    "mal": MemoryAsLayer,
    "mag": MemoryAsGate,
    "mac": MemoryAsContext,
}
WITHOUT_MEMORY = ("attention", "sliding")
GROWS = ("attention",)  # keep every token that they read


class Block(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x)."""

    def __init__(self, wiring: str, parts: Parts, hidden: int) -> None:
        super().__init__()
        self.mixer_norm = parts.norm()
        self.mixer = WIRINGS[wiring](parts)
        self.mlp_norm = parts.norm()
        self.mlp = SwiGLU(parts.width, hidden)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
        fresh: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """fresh: [B] bool, rows that begin a new stream whatever the state holds; None: as the state says."""
        if state is not None and fresh is not None:
            # here, where a sharded model has this block's weights together, not before all blocks
            state = state.where(~fresh, self.mixer.start(x.shape[0], x))
        y, state = self.mixer(self.mixer_norm(x), state, count, watch)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state
