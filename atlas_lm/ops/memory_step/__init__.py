"""One token of every row: the memory is written and read in one launch, for decoding.

The kernels are in `fused`, which is not imported here: it needs Triton.
"""

from atlas_lm.ops.memory_step.reference import memory_step_reference
from atlas_lm.ops.memory_step.rule import Pairs, StepRule, StepState, StepToken

__all__ = ["Pairs", "StepRule", "StepState", "StepToken", "memory_step_reference"]
