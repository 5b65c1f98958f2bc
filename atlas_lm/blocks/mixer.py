"""What every wiring offers to the block around it, and the sizes that it is built from."""

from dataclasses import dataclass

from torch import Tensor, nn

from atlas_lm.layers.attention import Attention
from atlas_lm.layers.memory import MemoryMixer
from atlas_lm.layers.norm import RMSNorm
from atlas_lm.layers.state import LayerState
from atlas_lm.memory import MemorySpec, Trace


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The sizes and choices that wirings are built from."""

    width: int
    spec: MemorySpec | None  # None where no block has a memory
    heads: int
    kv_heads: int
    head_dim: int
    window: int  # of sliding attention
    segment: int  # of memory as context
    persistent: int  # learned tokens before the stream
    combine: str  # of memory as gate: product or sum
    conv_size: int
    gate_rank: int
    gate_margin: float
    rope_theta: float
    eps: float

    def memory(self) -> MemoryMixer:
        assert self.spec is not None
        return MemoryMixer(
            self.spec,
            self.width,
            conv_size=self.conv_size,
            gate_rank=self.gate_rank,
            gate_margin=self.gate_margin,
            eps=self.eps,
        )

    def attention(self, window: int | None) -> Attention:
        return Attention(
            self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=window,
            rope_theta=self.rope_theta,
        )

    def norm(self) -> RMSNorm:
        return RMSNorm(self.width, self.eps)


class Mixer(nn.Module):
    """A causal map x [B, T, D] -> y [B, T, D] with a state."""

    def start(self, batch: int, like: Tensor) -> LayerState:
        """The state before the first token, in the dtype and on the device of `like`."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, LayerState]:
        """state None: the stream begins.  count: [B] tokens that count, first in each row; None: all.
        watch: a list that receives the memory's trace of these tokens."""
        raise NotImplementedError
