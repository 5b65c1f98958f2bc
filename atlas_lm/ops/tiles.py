"""How kernels are cut and compiled. Tiles change speed, never results; `benchmarks/tiles.py` tries others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import triton

Cut = TypeVar("Cut")


@dataclass(frozen=True)
class Tile:
    block: int  # value columns that a program holds at a time
    warps: int
    stages: int  # of the pipeline that loads tiles
    registers: int | None = None  # per thread, at most

    def options(self, values: int) -> dict[str, Any]:
        """Launch options for so many values: no block is wider than they are, none below 16."""
        block = max(16, min(self.block, triton.next_power_of_2(values)))
        found = dict(BV=block, num_warps=self.warps, num_stages=self.stages)
        return found if self.registers is None else found | dict(maxnreg=self.registers)


def pick(table: Mapping[str, Cut], kernel: str, traits: Mapping[str, bool]) -> Cut:
    """The last entry of a table whose words, behind the kernel's name, are all traits of the call.

    >>> table = {"walk": Tile(64, 4, 2), "walk momentum": Tile(32, 4, 2)}
    >>> pick(table, "walk", {"momentum": True}).block
    32
    """
    found = None
    for key, tile in table.items():
        name, *words = key.split()
        if name == kernel and all(traits[word] for word in words):
            found = tile
    assert found is not None, kernel
    return found
