"""A stretch of tokens as the forms see it: head-major, one dtype, gates by name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    q: Tensor  # [B, H, T, K]
    k: Tensor  # [B, H, T, K]
    v: Tensor  # [B, H, T, V]
    gates: dict[str, Tensor]  # each [B, H, T] or [B, H, T, offsets]
    valid: Tensor | None  # [B, T] bool; None: all are

    @property
    def count(self) -> int:
        return self.q.shape[2]

    def to(self, dtype: torch.dtype) -> "Tokens":
        """Queries, keys and values in another dtype; gates as they are."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def each(self) -> Iterator["Tokens"]:
        """One token after the other, without the time axis. Taken apart at once: see `layout.split`."""
        q, k, v = self.q.unbind(2), self.k.unbind(2), self.v.unbind(2)
        gates = {name: gate.unbind(2) for name, gate in self.gates.items()}
        for t in range(self.count):
            now = {name: gate[t] for name, gate in gates.items()}
            yield Tokens(q[t], k[t], v[t], now, None if self.valid is None else self.valid[:, t])

    def pair_fields(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """What the window keeps of a token: key, value, and the gates that belong to pairs."""
        return {"k": self.k, "v": self.v} | {name: self.gates[name] for name in names}
