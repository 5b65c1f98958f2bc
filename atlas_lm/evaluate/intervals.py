"""How sure a share is."""

import math

Z = 1.96  # 95 %


def wilson(share: float, count: int, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a share of `count` samples.

    For scores between 0 and 1 it is safe: no such score spreads more than right and wrong would.

    >>> [round(end, 3) for end in wilson(0.9, 100)]
    [0.826, 0.945]
    """
    if count < 1:
        raise ValueError("an interval needs at least one sample")
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * spread / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)
