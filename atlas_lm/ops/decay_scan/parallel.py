"""The decay scan as one masked matmul."""

import torch
from torch import Tensor


def decay_scan(
    x: Tensor, initial: Tensor, *, decay: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:
    """S_t = a_t S_{t-1} + x_t, S_0 = initial, as S = L x + L_0 initial with L of size T x T.

    x: [..., T, N]   initial: [..., N]   returns S: [..., T, N]
    Exactly one of decay: [..., T] in [0, 1] and log_decay: [..., T] <= 0. Log space loses nothing
    over millions of steps and cannot hold a_t = 0; plain factors can, gradient included.

    >>> decay_scan(torch.ones(3, 1), torch.zeros(1), decay=torch.tensor([0.5, 0.5, 0.5])).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    if (decay is None) == (log_decay is None):
        raise ValueError("decay_scan takes exactly one of decay and log_decay; pass one of them")
    if log_decay is not None:
        products = _between(log_decay, fill=0.0).cumsum(-2).exp().tril()
    else:
        assert decay is not None
        products = _between(decay, fill=1.0).cumprod(-2).tril()
    rows = torch.cat([initial.unsqueeze(-2), x], dim=-2)
    return products[..., 1:, :] @ rows


def _between(factor: Tensor, fill: float) -> Tensor:
    """[..., T] -> [..., T+1, T+1] with factor_t at row t below the diagonal, `fill` elsewhere.

    Accumulated down the columns it gives the product (or the sum of logs) strictly after column i
    up to row t, each range on its own: no difference of two large sums, so nothing cancels.
    """
    size = factor.shape[-1] + 1
    below = torch.ones(size, size, dtype=torch.bool, device=factor.device).tril(-1)
    rows = (
        torch.nn.functional.pad(factor, (1, 0)).unsqueeze(-1).expand(*factor.shape[:-1], -1, size)
    )
    return torch.where(below, rows, fill)
