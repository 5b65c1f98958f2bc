"""The decay scan as a loop: its definition."""

import torch
from torch import Tensor


def decay_scan_reference(x: Tensor, initial: Tensor, *, decay: Tensor) -> Tensor:
    """S_t = a_t S_{t-1} + x_t, S_0 = initial.

    x: [..., T, N]   initial: [..., N]   decay: [..., T], the factors a_t themselves
    returns S: [..., T, N]
    """
    state, states = initial, []
    for t in range(x.shape[-2]):
        state = decay[..., t, None] * state + x[..., t, :]
        states.append(state)
    return torch.stack(states, dim=-2)
