"""The feed-forward half of a block."""

from torch import Tensor, nn
from torch.nn.functional import silu

from atlas_lm.layers.out import OutLinear


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = OutLinear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y
