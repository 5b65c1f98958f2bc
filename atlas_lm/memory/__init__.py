"""The mathematics of test-time memory: specs, states, and the doors that run them.

parts       architectures, features, objectives, windows, optimizers, retention; gates: what they read
points      spec, presets; defaults: gate values to start from
values      state, tokens, trace
definition  reference (and pairs, for memories of kept pairs)
fast form   parallel: layout lays tokens out, stretch is one chunk of them; chunks (jumps, for Muon),
            online and pairs run it on coefficients, which basis and trajectory turn back into a memory
doors       memorize; packing, for sequences packed into one row
"""

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
