"""One token of every row: the memory is written and read in one launch, for decoding.

The kernels are in `fused` and `prepare`, which are not imported here: they need Triton.
"""

from atlas_lm.ops.memory_step.reference import memory_step_reference
from atlas_lm.ops.memory_step.rule import Columns, Pairs, StepRule, StepState, StepToken

__all__ = [
    "Columns",
    "Pairs",
    "StepRule",
    "StepState",
    "StepToken",
    "memory_step_reference",
]
