"""Where and how a run runs: the side of it that recipes do not know."""

from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how a run runs. Nothing here changes what is learned, but for rounding."""

    out: Path
    device: str = "cpu"
    dtype: str | None = None  # of products; weights stay fp32. None: bfloat16 on CUDA, else float32
    spread: str | None = None  # alone, ddp or fsdp
    micro: int | None = None  # rows of a process at once; None: all of a step
    recompute: bool = False  # activations, in the backward pass
    compiled: bool = False
    workers: int = 2  # processes that make data, for each that trains
    save_every: int | None = None  # steps; None: twenty times in a run
    keep: int = 2  # checkpoints

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, wanted one of {', '.join(DTYPES)}")
        for name in ("micro", "save_every", "keep"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} is {given}, wanted 1 or more")

    def chosen_dtype(self, device: torch.device) -> torch.dtype:
        default = "bfloat16" if device.type == "cuda" else "float32"
        return DTYPES[self.dtype or default]
