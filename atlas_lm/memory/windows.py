"""The Omega rule's window: which past pairs are optimised together, and how each is weighted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atlas_lm.memory.gates import Gate, Gates


@dataclass(frozen=True, kw_only=True)
class Window:
    """The last `size` pairs, pair t-j weighted by gamma.

    `offset`: token t brings gamma_{t,j} for j = 0..size-1; `pair`: pair i brings one gamma_i and keeps
    it; `fixed`: every pair weighs 1/size.
    """

    kind: ClassVar[str] = "window"
    size: int = 1
    gate: Literal["offset", "pair", "fixed"] = "fixed"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(
                f"window size is {self.size}, wanted 1 (the newest pair alone) or more"
            )
        if self.gate not in ("offset", "pair", "fixed"):
            raise ValueError(f"window gate is {self.gate!r}, wanted 'offset', 'pair' or 'fixed'")

    def gates(self) -> tuple[Gate, ...]:
        if self.gate == "fixed":
            return ()
        if self.gate == "pair":
            return (Gate("gamma", 0.0, 1.0, of_pair=True),)
        return (Gate("gamma", 0.0, 1.0, offsets=self.size),)

    def weights_at(self, gates: Gates, pairs: Mapping[str, Tensor], present: Tensor) -> Tensor:
        """gamma of the window's pairs, oldest first, as one token sees them.

        gates: [B, H, ...] of the token   pairs: [B, H, size, ...]   present: [B, size] bool
        returns [B, H, size]
        """
        if self.gate == "pair":
            gamma = pairs["gamma"]
        elif self.gate == "offset":
            gamma = gates["gamma"].flip(-1)
        else:
            gamma = torch.full_like(pairs["v"][..., 0], 1.0 / self.size)
        return gamma * present.unsqueeze(1)

    def weight_matrix(self, gates: Gates, pairs: Mapping[str, Tensor], present: Tensor) -> Tensor:
        """Ms[n, i]: gamma of pair i as token n of a stretch sees it, 0 outside the window.

        gates: [B, H, T, ...]   pairs: [B, H, size-1 + T, ...], the halo first
        present: [B, T, size-1 + T] bool   returns [B, H, T, size-1 + T]
        """
        tokens, halo = present.shape[1], self.size - 1
        rows = torch.arange(tokens, device=present.device).unsqueeze(1)
        columns = torch.arange(tokens + halo, device=present.device)
        age = rows + halo - columns  # j = n - i, counted from the newest
        inside = ((age >= 0) & (age < self.size) & present).unsqueeze(1)
        if self.gate == "pair":
            gamma = pairs["gamma"].unsqueeze(2)
        elif self.gate == "offset":
            index = age.clamp(0, halo).expand(*gates["gamma"].shape[:2], -1, -1)
            gamma = gates["gamma"].gather(-1, index)
        else:
            gamma = torch.full_like(pairs["v"][..., 0], 1.0 / self.size).unsqueeze(2)
        return torch.where(inside, gamma, 0.0)
