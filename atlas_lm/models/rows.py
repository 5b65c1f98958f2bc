"""Bring any batch into one form: rows whose tokens that count stand first.

Blocks know no mask: left padding, holes and packed sequences all end here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.memory.packing import Packing, pack


@dataclass(frozen=True)
class Rows:
    count: Tensor | None  # [N] tokens that count in each row; None: all
    order: Tensor | None = None  # [B, T] where the tokens of a row come from
    valid: Tensor | None = None  # [B, T] of the batch as it came
    packing: Packing | None = None

    def spread(self, x: Tensor) -> Tensor:
        """[B, T, D] as it came -> rows; zero, whatever stood there, where nothing counts."""
        if self.packing is not None:
            return torch.where(self.packing.valid.unsqueeze(-1), self.packing.spread(x), 0.0)
        if self.order is None or self.valid is None:
            return x
        x = torch.where(self.valid.unsqueeze(-1), x, 0.0)
        return x.gather(1, self.order.unsqueeze(-1).expand_as(x))

    def join(self, x: Tensor) -> Tensor:
        """Rows -> [B, T, D] as the batch came, zero where nothing counts."""
        if self.packing is not None:
            return self.packing.join(x)
        if self.order is None or self.valid is None:
            return x
        back = (self.valid.cumsum(1) - 1).clamp_min(0)
        x = x.gather(1, back.unsqueeze(-1).expand_as(x))
        return torch.where(self.valid.unsqueeze(-1), x, 0.0)


def arrange(batch: int, tokens: int, mask: Tensor | None, borders: Tensor | None) -> Rows:
    """mask: [B, T] bool, True for tokens that count.  borders: [N+1] of sequences packed in one row."""
    if borders is not None:
        packing = pack(borders, batch, tokens)
        return Rows(count=packing.valid.sum(1), packing=packing)
    if mask is None:
        return Rows(count=None)
    order = torch.argsort(mask.logical_not().to(torch.int8), dim=1, stable=True)
    return Rows(count=mask.sum(1), order=order, valid=mask)
