"""Orders in which warps, copies and products may happen: none may change a bit."""

import torch

from tests.hopper.driver import emulated
from tests.hopper.machine import Order

ORDERS = (Order("up", late=False), Order("down", late=True))


def in_all_orders(run):
    """The results by name of `run()`, which launches kernels, the same in every order."""
    found = []
    for order in ORDERS:
        with emulated(order):
            found.append(run())
    first, *others = found
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} depends on the order of warps"
    return first
