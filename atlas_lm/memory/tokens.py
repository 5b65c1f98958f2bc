"""A stretch of tokens as the forms see it: head-major, one dtype, gates by name."""

from dataclasses import dataclass

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

    def at(self, t: int) -> "Tokens":
        """Token t alone, without the time axis."""
        return Tokens(
            self.q[:, :, t],
            self.k[:, :, t],
            self.v[:, :, t],
            {name: gate[:, :, t] for name, gate in self.gates.items()},
            None if self.valid is None else self.valid[:, t],
        )

    def pair_fields(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """What the window keeps of a token: key, value, and the gates that belong to pairs."""
        return {"k": self.k, "v": self.v} | {name: self.gates[name] for name in names}
