"""Orthogonalise a batch of small matrices by matrix products alone (Muon's inner step)."""

from atlas_lm.ops.newton_schulz.parallel import newton_schulz
from atlas_lm.ops.newton_schulz.reference import newton_schulz_reference
from atlas_lm.ops.newton_schulz.schedules import SCHEDULES, schedule

__all__ = ["SCHEDULES", "newton_schulz", "newton_schulz_reference", "schedule"]
