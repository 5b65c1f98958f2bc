"""Root-mean-square norm."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight brought to the input's dtype: under autocast they differ, and only equal
    ones take the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
