"""S_t = a_t S_{t-1} + x_t: the scan under momentum and retention."""

from atlas_lm.ops.decay_scan.parallel import decay_scan
from atlas_lm.ops.decay_scan.reference import decay_scan_reference

__all__ = ["decay_scan", "decay_scan_reference"]
