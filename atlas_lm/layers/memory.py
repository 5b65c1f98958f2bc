"""The memory mixer: projections, short convolution and gates around a memory (docs/mathematics.md, 7)."""

from typing import cast

import torch
from torch import Tensor, nn

from atlas_lm.layers.conv import ShortConv
from atlas_lm.layers.gates import Gates
from atlas_lm.layers.norm import RMSNorm
from atlas_lm.layers.out import OutLinear
from atlas_lm.layers.tail import counted
from atlas_lm.memory import MemorySpec, MemoryState, Trace, initial_state, memorize, recall
from atlas_lm.memory.features import Exponential, Unit
from atlas_lm.ops.gated_norm import gated_norm


class MemoryWeights(nn.Module):
    """The outer weights of a spec: parameters, and buffers for those that are frozen.

    A module's name cannot hold a dot, so `memory.w0` is kept as `memory_w0`.
    """

    def __init__(self, spec: MemorySpec) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in spec.weight_shapes.items():
            if name in spec.frozen_weights:
                self.register_buffer(name.replace(".", "_"), torch.empty(shape))
            else:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.empty(shape)))

    def forward(self) -> dict[str, Tensor]:
        """By the names of the spec."""
        return {name: getattr(self, name.replace(".", "_")) for name in self.spec.weight_shapes}


class MemoryMixer(nn.Module):
    """x [B, T, D] -> y [B, T, D]: every token writes its pair, then reads with its query.

    q, k: linear, short convolution, SiLU, unit length; v: linear, short convolution, SiLU. What is read
    is normed per head, gated by the input and projected out.
    """

    def __init__(
        self,
        spec: MemorySpec,
        width: int,
        *,
        conv_size: int,
        gate_rank: int,
        gate_margin: float = 0.0,
        eps: float,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.sizes = [spec.heads * spec.key_dim] * 2 + [spec.heads * spec.value_dim]
        self.q_proj = nn.Linear(width, self.sizes[0], bias=False)
        self.k_proj = nn.Linear(width, self.sizes[1], bias=False)
        self.v_proj = nn.Linear(width, self.sizes[2], bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size)
        # these two have a say of their own on the length of keys
        free = isinstance(spec.features, Unit | Exponential)
        self.units = (None, None, None) if free else (spec.key_dim, spec.key_dim, None)
        self.gates = Gates(spec, width, gate_rank, gate_margin)
        self.weights = MemoryWeights(spec)
        self.o_norm = RMSNorm(spec.value_dim, eps)
        self.g_proj = nn.Linear(width, self.sizes[2], bias=False)
        self.o_proj = OutLinear(self.sizes[2], width)

    def start(self, batch: int, like: Tensor) -> tuple[MemoryState, Tensor]:
        """Memory and tail of the convolution before the first token."""
        inner = torch.promote_types(like.dtype, torch.float32)
        state = initial_state(self.spec, self.weights(), batch, dtype=inner, device=like.device)
        return state, self.conv.start(batch, like)

    def forward(
        self,
        x: Tensor,
        memory: MemoryState | None,
        tail: Tensor | None,
        count: Tensor | None = None,
        watch: list[Trace] | None = None,
    ) -> tuple[Tensor, MemoryState, Tensor]:
        """Read and write. watch: a list that receives the trace of the memory."""
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        parts, tail = self.conv(parts, tail, count, self.units)
        q, k, v = (self._heads(part) for part in parts)
        given = (self.spec, self.weights(), memory, q, k, v, self.gates(x))
        valid = counted(count, x.shape[1])
        # check=False: the producers keep every gate in its range
        if watch is None:
            y, memory = memorize(*given, valid=valid, check=False)
        else:
            y, memory, seen = memorize(*given, valid=valid, check=False, trace=True)
            watch.append(seen)
        return self._out(x, y), memory, tail

    def read(
        self, x: Tensor, memory: MemoryState, tail: Tensor | None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read only. tail: [B, size-1, H K], of the queries' own convolution."""
        (q,), tail = self.conv((self.q_proj(x),), tail, count, self.units[:1])
        y = recall(self.spec, self.weights(), memory, self._heads(q))
        return self._out(x, y), tail

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H K] -> [B, T, H, K]"""
        return x.unflatten(-1, (self.spec.heads, -1))

    def _out(self, x: Tensor, y: Tensor) -> Tensor:
        gate = self._heads(self.g_proj(x))
        read = gated_norm(y, gate, self.o_norm.weight, cast(float, self.o_norm.eps))
        out: Tensor = self.o_proj(read.flatten(-2))
        return out
