"""Adapters for `atlas doctor`: the memory of the PyPI package titans-pytorch, in two settings.

    pip install titans-pytorch
    cd examples
    atlas doctor --layer titans_pytorch_layers:by_default --layer titans_pytorch_layers:in_batches

A layer needs no more than this to be examined: x [B, T, D] in, (y, state) out.
"""

from typing import Any

from titans_pytorch import NeuralMemory
from torch import Tensor, nn


class Examined(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.memory = NeuralMemory(dim=32, dim_head=16, heads=2, **settings)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.memory(x, state=state)


def by_default() -> Examined:
    """Gradients at the initial weights, chunks of 4 tokens."""
    return Examined(chunk_size=4)


def in_batches() -> Examined:
    """The memory's weights move every 16 tokens (`batch_size`)."""
    return Examined(chunk_size=4, batch_size=16)
