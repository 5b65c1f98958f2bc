"""atlas-lm: test-time memory for sequence models. Titans, ATLAS and their family, exact."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "MemorySpec",
    "MemoryState",
    "Timing",
    "Trace",
    "initial_state",
    "memorize",
    "presets",
    "recall",
]

if TYPE_CHECKING:
    from atlas_lm.memory import (
        MemorySpec,
        MemoryState,
        Timing,
        Trace,
        initial_state,
        memorize,
        presets,
        recall,
    )


def __getattr__(name: str) -> Any:
    """Load torch only when something that needs it is asked for."""
    if name in __all__:
        return getattr(importlib.import_module("atlas_lm.memory"), name)
    raise AttributeError(f"module 'atlas_lm' has no attribute {name!r}")
