"""The learning rate over the steps."""

import math

from atlas_lm.train.recipe import Schedule


def share_of_rate(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of a step, 0 .. steps - 1, as a share of its highest value.

    >>> wsd = Schedule(curve="wsd", warm=0.2, fall=0.4)
    >>> [round(share_of_rate(wsd, step, 10), 2) for step in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    """
    warm = round(schedule.warm * steps)
    if step < warm:
        return (step + 1) / warm
    return schedule.floor + (1 - schedule.floor) * _fall(schedule, step, warm, steps)


def _fall(schedule: Schedule, step: int, warm: int, steps: int) -> float:
    """From 1 after the warm-up to near 0 in the last step."""
    if schedule.curve == "constant":
        return 1.0
    if schedule.curve == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
    fall = round(schedule.fall * steps)
    return min(1.0, (steps - step) / (fall + 1))
