"""The mathematics of test-time memory: specs, states, and the doors that run them."""

from atlas_lm.memory import presets
from atlas_lm.memory.memorize import memorize, recall
from atlas_lm.memory.spec import MemorySpec, Timing
from atlas_lm.memory.state import MemoryState, initial_state
from atlas_lm.memory.trace import Trace

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
