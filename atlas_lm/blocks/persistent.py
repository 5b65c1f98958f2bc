"""Learned tokens that stand before every stream."""

import torch
from torch import Tensor, nn


class Persistent(nn.Module):
    """P vectors of the model's width, the same for every input: knowledge of the task, not of the text."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(tokens, width))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, batch: int, like: Tensor) -> Tensor:
        """[B, P, D]"""
        return self.tokens.to(like.dtype).expand(batch, -1, -1)

    def before(self, x: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[persistent, x], and how many of them count."""
        x = torch.cat([self.rows(x.shape[0], x), x], dim=1)
        return x, None if count is None else count + len(self)
