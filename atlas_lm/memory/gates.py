"""What a gate is: a per-token number from the input that a part of the rule reads."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Gates = Mapping[str, Tensor]


@dataclass(frozen=True)
class Gate:
    """Declared by the part that reads it; the layer above builds one projection per declaration.

    A gate of a `pair` travels with its key and value through the window; one of a token does not.
    """

    name: str
    low: float  # smallest legal value
    high: float  # largest legal value
    open_end: bool = False  # True: `high` itself is refused
    of_pair: bool = False  # True: belongs to the pair, and is kept with it in the window
    offsets: int = 0  # number of values per token and head; 0 means a plain scalar [B, T, H]

    def shape(self, batch: int, tokens: int, heads: int) -> tuple[int, ...]:
        shape = (batch, tokens, heads)
        return (*shape, self.offsets) if self.offsets else shape

    def describe_range(self) -> str:
        return f"[{self.low:g}, {self.high:g}{')' if self.open_end else ']'}"


LOG_ALPHA = Gate("log_alpha", float("-inf"), 0.0)
ETA = Gate("eta", 0.0, float("inf"))
THETA = Gate("theta", 0.0, 1.0, open_end=True)
DELTA = Gate("delta", 0.0, float("inf"), of_pair=True)


def check_gates(declared: Mapping[str, Gate], gates: Gates, sizes: Mapping[str, int]) -> None:
    """Refuse gates that are missing, unknown or of the wrong shape."""
    missing = [name for name in declared if name not in gates]
    unknown = [name for name in gates if name not in declared]
    if missing or unknown:
        raise ValueError(
            f"gates are {sorted(gates)}, this spec reads {sorted(declared)}; "
            + (f"add {missing}" if missing else f"drop {unknown}")
        )
    for name, gate in declared.items():
        wanted = gate.shape(sizes["B"], sizes["T"], sizes["H"])
        if tuple(gates[name].shape) != wanted:
            raise ValueError(
                f"gate {name} has shape {list(gates[name].shape)}, wanted {list(wanted)} for "
                f"[B, T, H{', offsets' if gate.offsets else ''}]; make one value per token and head"
                f"{' and offset of the window' if gate.offsets else ''}"
            )


def check_gate_values(
    declared: Mapping[str, Gate], gates: Gates, valid: Tensor | None = None
) -> None:
    """Refuse gate values outside their range, looking at valid tokens only (reads the tensors)."""
    for name, gate in declared.items():
        value = gates[name].detach()
        above = value >= gate.high if gate.open_end else value > gate.high
        bad = (value < gate.low) | above | value.isnan() | value.isposinf()
        if valid is not None:
            bad = bad & valid.reshape(*valid.shape, *[1] * (bad.dim() - 2))
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"gate {name} is {value[where].item():g} at {list(where)}, wanted a number in "
                f"{gate.describe_range()}; "
                + (
                    "pass the logarithm of the retention, e.g. -softplus(x)"
                    if name == "log_alpha"
                    else "squash it before the call, e.g. by a sigmoid"
                )
            )


def head_major(gate: Tensor) -> Tensor:
    """[B, T, H, ...] -> [B, H, T, ...]"""
    return torch.movedim(gate, 2, 1)
