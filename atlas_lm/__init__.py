"""atlas-lm: test-time memory for sequence models. Titans, ATLAS and their family, exact."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "AtlasCache",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasModel",
    "Conversation",
    "MemorySpec",
    "MemoryState",
    "Stream",
    "Timing",
    "Trace",
    "configure",
    "initial_state",
    "memorize",
    "open_memory",
    "presets",
    "recall",
    "save_memory",
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
    from atlas_lm.models import AtlasCache, AtlasConfig, AtlasForCausalLM, AtlasModel, configure
    from atlas_lm.stream import Conversation, Stream, open_memory, save_memory

_ROOMS = {  # where a name lives, if not in the memory
    "atlas_lm.models": ("AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel", "configure"),
    "atlas_lm.stream": ("Conversation", "Stream", "open_memory", "save_memory"),
}


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when something that needs them is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'atlas_lm' has no attribute {name!r}")
    room = next((room for room, names in _ROOMS.items() if name in names), "atlas_lm.memory")
    return getattr(importlib.import_module(room), name)
