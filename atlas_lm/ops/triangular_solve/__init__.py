"""X = R + N X with N strictly lower triangular: how errors inside a tile depend on each other."""

from atlas_lm.ops.triangular_solve.parallel import triangular_solve
from atlas_lm.ops.triangular_solve.reference import triangular_solve_reference

__all__ = ["triangular_solve", "triangular_solve_reference"]
