"""Orders in which warps, copies and products may happen: none may change a bit."""

import torch

from tests.hopper.driver import emulated
from tests.hopper.machine import Order

EARLY, LATE = Order("up", late=False), Order("down", late=True)


def late(run):
    """The results of `run()`, which launches kernels, in the order that is hardest on missing barriers."""
    with emulated(LATE):
        return run()


def in_all_orders(run):
    """The results by name of `run()`, the same in every order."""
    found = []
    for order in (EARLY, LATE):
        with emulated(order):
            found.append(run())
    first, *others = found
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} depends on the order of warps"
    return first
