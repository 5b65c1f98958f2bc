"""How much memory this process holds."""

import os
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory; None where the system does not tell."""
    if not STATM.exists():
        return None
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
