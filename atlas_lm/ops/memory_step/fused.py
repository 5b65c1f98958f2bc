"""One token of every row in one launch: the host's side of the step kernels.

Memory-bound: per row and head the weights' bytes are read once from memory, anchor and momentum and written
once to memory and momentum; the anchor is written on borders alone if both states share it.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from atlas_lm.ops.memory_step.matrix import matrix_step
from atlas_lm.ops.memory_step.mlp import mlp_step
from atlas_lm.ops.memory_step.rule import Pairs, StepRule, StepState, StepToken

Weights = tuple[Tensor, ...]
TILE = (
    4096  # numbers of a weight that a program of 8 warps holds at a time: two programs fit on an SM
)
MOST_FEATURES, MOST_HIDDEN, MOST_PAIRS = 1024, 1024, 64
MOST_COLUMNS = 16384  # hidden units x pairs that a program holds at a time


def why_not(features: int, hidden: int, pairs: int, matrix: bool, objective: str) -> str | None:
    """Why the kernels do not take these sizes; None: they do. hidden: 0 for a matrix."""
    if matrix and objective == "huber":
        return (
            "the step kernel cuts a matrix into blocks of values, and Huber needs the norm of all"
        )
    if matrix and features > MOST_FEATURES:
        return f"the step kernel holds {MOST_FEATURES} features of a key, and here are {features}"
    if hidden > MOST_HIDDEN:
        return f"the step kernel holds {MOST_HIDDEN} hidden units, and here are {hidden}"
    if pairs > MOST_PAIRS or _padded(pairs) * _wide(hidden) > MOST_COLUMNS:
        return (
            f"the step kernel has no room for a window of {pairs} pairs with {hidden} hidden units"
        )
    return None


def memory_step(
    rule: StepRule,
    state: StepState,
    token: StepToken,
    start: Weights = (),
    into: StepState | None = None,
) -> tuple[Tensor, StepState]:
    """Write one pair and read one query in every row. All fp32; no gradients.

    start: the initial weights [H, O, I], for decay_to_start.
    into: the state whose tensors, all contiguous, receive the result. None of them may be one of `state`,
        but for the anchor: if both have the same, it is written on chunk borders alone.
    Returns y [B, H, V] and the next state: `into`, or one of new tensors.
    """
    state, start = _contiguous(state), tuple(w.contiguous() for w in start)
    into = empty_like(state) if into is None else into
    shared = bool(state.anchor) and into.anchor[0].data_ptr() == state.anchor[0].data_ptr()
    token = StepToken(*(None if x is None else x.contiguous() for x in token))  # type: ignore[arg-type]
    y = torch.empty_like(token.v)
    launch = _matrix if len(state.memory) == 1 else _mlp
    with torch.cuda.device_of(y):  # kernels run on the current device
        launch(rule, state, token, start, into, y, shared)
    return y, into


def empty_like(state: StepState, anchor: Weights | None = None) -> StepState:
    """Room for a state of these shapes. anchor: tensors to take for the anchor's."""
    return StepState(
        memory=_fresh(state.memory),
        anchor=_fresh(state.anchor) if anchor is None else anchor,
        momentum=_fresh(state.momentum),
        window=Pairs(*(None if x is None else torch.empty_like(x) for x in state.window)),  # type: ignore[arg-type]
        position=torch.empty_like(state.position),
    )


def _matrix(
    rule: StepRule,
    state: StepState,
    token: StepToken,
    start: Weights,
    into: StepState,
    y: Tensor,
    shared: bool,
) -> None:
    rows, heads, values, features = state.memory[0].shape
    sizes, wide = _sizes(token), _wide(features)
    tile = max(16, min(TILE // wide, _wide(values)))
    matrix_step[rows * heads, triton.cdiv(values, tile)](
        *(_first(group) for group in (state.memory, state.anchor, state.momentum, start)),
        *(_first(group) for group in (into.memory, into.anchor, into.momentum)),
        state.window,
        into.window,
        token,
        state.position,
        into.position,
        y,
        **sizes,
        F=features,
        FEATURES=wide,
        TILE=tile,
        **_facts(rule, shared),
        **_resources(tile * wide, sizes["C"], least=4),
    )


def _mlp(
    rule: StepRule,
    state: StepState,
    token: StepToken,
    start: Weights,
    into: StepState,
    y: Tensor,
    shared: bool,
) -> None:
    rows, heads, hidden, features = state.memory[0].shape
    sizes, wide = _sizes(token), _wide(hidden)
    room = max(16 if sizes["C"] > 1 or wide < 1024 else 8, TILE // wide)
    double = room if sizes["C"] > 1 else 2 * room  # slopes need one weight at a time
    mlp_step[(rows * heads,)](
        *(_all(group) for group in (state.memory, state.anchor, state.momentum, start)),
        *(_all(group) for group in (into.memory, into.anchor, into.momentum)),
        state.window,
        into.window,
        token,
        state.position,
        into.position,
        y,
        y.new_empty(rows, heads, sizes["SIZE"], y.shape[-1]),
        **sizes,
        F=features,
        D=hidden,
        HIDDEN=wide,
        POINT_F=min(double, _wide(features)),
        POINT_V=min(double, _wide(token.v.shape[-1])),
        STEP_F=min(room, _wide(features)),
        STEP_V=min(room, _wide(token.v.shape[-1])),
        GATED=len(state.memory) == 3,
        ACTIVATION=rule.activation,
        DELTA=rule.delta,
        **_facts(rule, shared),
        **_resources(room * wide, sizes["C"], least=8),
    )


def _sizes(token: StepToken) -> dict[str, int]:
    pairs = token.x.shape[2] - 1
    return {
        "HEADS": token.v.shape[1],
        "K": token.k.shape[-1],
        "V": token.v.shape[-1],
        "SIZE": pairs,
        "C": _padded(pairs),
    }


def _facts(rule: StepRule, shared: bool) -> dict[str, Any]:
    return {
        "OBJECTIVE": rule.objective,
        "GAMMA": rule.gamma,
        "RETENTION": rule.retention,
        "SKIP": rule.skip,
        "AFTER": rule.after_retention,
        "CHUNK": rule.chunk,
        "SHARED": shared,
        "PRECISION": "tf32x3",
    }


def _resources(numbers: int, columns: int, least: int) -> dict[str, int]:
    """Warps for a tile, and registers so that two programs of eight warps share an SM."""
    warps = 16 if numbers > TILE else 8 if columns > 1 else least
    return {"num_warps": warps, "num_stages": 1} | ({"maxnreg": 128} if warps >= 8 else {})


def _padded(pairs: int) -> int:
    """Columns of the kernels' tiles of pairs: 1, or what a dot takes."""
    return 1 if pairs == 1 else _wide(pairs)


@functools.cache
def _wide(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _contiguous(state: StepState) -> StepState:
    """The same state, which it is as a rule."""
    window = Pairs(*(None if x is None else x.contiguous() for x in state.window))  # type: ignore[arg-type]
    return StepState(
        memory=tuple(w.contiguous() for w in state.memory),
        anchor=tuple(w.contiguous() for w in state.anchor),
        momentum=tuple(w.contiguous() for w in state.momentum),
        window=window,
        position=state.position.contiguous(),
    )


def _fresh(weights: Weights) -> Weights:
    return tuple(torch.empty_like(w) for w in weights)


def _first(weights: Weights) -> Tensor | None:
    return weights[0] if weights else None


def _all(weights: Weights) -> tuple[Tensor | None, ...]:
    return weights or (None, None, None)
