"""One token per row in one launch: how a spec and a state look to `ops.memory_step`, or why they do not."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from atlas_lm.memory.defaults import gate_defaults
from atlas_lm.memory.features import Identity, Unit
from atlas_lm.memory.objectives import Huber
from atlas_lm.memory.optimizers import ImplicitDescent, Muon
from atlas_lm.memory.retention import Renormalise
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState
from atlas_lm.memory.tokens import Tokens
from atlas_lm.ops.backend import why_not_triton
from atlas_lm.ops.memory_step import Columns, Pairs, StepRule, StepState, StepToken

Weights = Mapping[str, Tensor]
NAMES = ("w0", "w1", "gate")  # the order in which the kernels take fast weights


def declines(
    spec: MemorySpec, weights: Weights, state: MemoryState, tokens: Tokens, trace: bool = False
) -> str | None:
    """Why this call cannot be a single step in one launch; None where it can."""
    if tokens.count != 1:
        return f"a single step takes one token per row, and here are {tokens.count}"
    if trace:
        return "the single-step kernel keeps no trace"
    inputs = (tokens.q, tokens.k, tokens.v, *tokens.gates.values(), *state.leaves().values())
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *weights.values())):
        return "the single-step kernel has no backward"
    return unfit(spec, tokens.q, *state.memory.values())


def unfit(spec: MemorySpec, *tensors: Tensor) -> str | None:
    """Why no step of this rule on such tensors can be one launch; None where it can."""
    return why_not_triton(*tensors) or _unknown(spec)


@functools.cache
def _unknown(spec: MemorySpec) -> str | None:
    from atlas_lm.ops.memory_step.fused import why_not

    if spec.keeps_pairs:
        return "kept pairs grow with the stream, and the single-step kernel writes fast weights"
    if isinstance(spec.optimizer, Muon):
        return "the single-step kernel has no Newton-Schulz"
    if isinstance(spec.retention, Renormalise):
        return "the single-step kernel does not renormalise rows"
    if spec.network.norm:
        return "the single-step kernel has no output norm"
    if spec.network.depth > 2:
        return (
            f"the single-step kernel knows depth 1 and 2, and this memory has {spec.network.depth}"
        )
    matrix = spec.network.depth == 1
    hidden = 0 if matrix else spec.fast_shapes["w0"][0]
    return why_not(spec.feature_dim, hidden, spec.window.size, matrix, spec.objective.kind)


def run(
    spec: MemorySpec,
    weights: Weights,
    state: MemoryState,
    tokens: Tokens,
    into: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Write and read one token per row: y [B, H, 1, V] and the next state. `declines` must say None.

    into: a state whose tensors receive the result, e.g. a `twin`; by default they are new.
    """
    return write_and_read(spec, weights, state, encode(spec, weights, state.window, tokens), into)


def encode(
    spec: MemorySpec,
    weights: Weights,
    window: Mapping[str, Tensor],
    tokens: Tokens,
    x: Tensor | None = None,
) -> StepToken:
    """The token as the kernels take it: plain PyTorch, which torch.compile may trace.

    x: [B, H, c+1, F], the features of the window's keys, its own and its query, where they are known
    """
    if x is None:
        x = spec.features(torch.cat([window["k"], tokens.k, tokens.q], dim=2), weights)
    gates = {name: gate.squeeze(2) for name, gate in tokens.gates.items()}
    if spec.optimizer.step is not None or isinstance(spec.optimizer, ImplicitDescent):
        gates["eta"] = spec.optimizer.rate(gates, x[:, :, -2].square().sum(-1))
    valid = None if tokens.valid is None else tokens.valid.squeeze(1)
    return StepToken(x=x, k=tokens.k.squeeze(2), v=tokens.v.squeeze(2), valid=valid, **gates)


def prepare(
    spec: MemorySpec,
    projected: Tensor,
    tail: Tensor,
    into: Tensor,
    weights: Weights,
    margin: float = 0.0,
) -> tuple[Tokens, Tensor | None]:
    """From a block's projections to its token in one launch: convolution, SiLU, lengths, gates.

    projected: [B, n], side by side q, k, v, the inner values of the gates in the spec's order, anything
    tail: [B, size-1, .] of the convolution; into: receives the next one
    weights: conv, and for each gate up.* [H values, rank] and bias.* [H, values]
    margin: below which steps and decays are none
    Returns the token, and its features for `encode` where the key and the query are all that they need.
    """
    from atlas_lm.ops.memory_step.prepare import prepare as launch

    rank = weights[f"up.{next(iter(spec.gates))}"].shape[1] if spec.gates else 0
    layout = _columns(spec, rank, margin)
    ups, biases = (tuple(weights[f"{part}.{n}"] for n in spec.gates) for part in ("up", "bias"))
    made = launch(layout, projected, tail, weights["conv"], ups, biases, into)
    gates = {n: g if spec.gates[n].offsets else g.squeeze(-1) for n, g in made.gates.items()}
    gates = {n: g.unsqueeze(2) for n, g in gates.items()}
    tokens = Tokens(made.x[:, :, 1:], made.k.unsqueeze(2), made.v.unsqueeze(2), gates, None)
    return tokens, made.x if _own_features(spec) else None


@functools.cache
def _columns(spec: MemorySpec, rank: int, margin: float) -> Columns:
    return Columns(
        heads=spec.heads,
        key=spec.key_dim,
        value=spec.value_dim,
        rank=rank,
        gates=tuple(spec.gates),
        values=tuple(max(gate.offsets, 1) for gate in spec.gates.values()),
        window=spec.window.size,
        margin=margin,
        step=2 * gate_defaults(spec).get("eta", 0.0),
        unit_keys=not isinstance(spec.features, Unit),
        unit_features=isinstance(spec.features, Unit) and _own_features(spec),
    )


def _own_features(spec: MemorySpec) -> bool:
    """The features are key and query themselves, at most brought to unit length, and no older keys count."""
    return type(spec.features) in (Identity, Unit) and spec.window.size == 1


def write_and_read(
    spec: MemorySpec,
    weights: Weights,
    state: MemoryState,
    token: StepToken,
    into: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """The launch. Returns y [B, H, 1, V] and the next state, which is `into` where it is given."""
    from atlas_lm.ops.memory_step.fused import memory_step

    start: tuple[Tensor, ...] = ()
    if spec.retention.reads_start:
        start = tuple(weights[f"memory.{name}"] for name in NAMES if name in spec.fast_shapes)
    target = None if into is None else _laid(into)
    y, after = memory_step(_rule(spec), _laid(state), token, start, target)
    return y.unsqueeze(2), _named(state, after) if into is None else into


def twin(state: MemoryState) -> MemoryState:
    """Room for the state after `state`, to hand to `run` as `into`, and back again for the step after.

    Both share the anchor, which a step then writes on chunk borders alone. So of the two only the one
    written last is a state to keep: clone it before the other is written.
    """
    room = state.map(torch.empty_like)
    return replace(room, anchor=state.anchor)


@functools.cache
def _rule(spec: MemorySpec) -> StepRule:
    network, objective = spec.network, spec.objective
    return StepRule(
        activation=network.activation,
        skip=network.skip and spec.feature_dim == spec.value_dim,
        objective=objective.kind,  # type: ignore[arg-type]
        delta=objective.delta if isinstance(objective, Huber) else None,
        gamma=spec.window.gate,
        retention=spec.retention.kind,  # type: ignore[arg-type]
        after_retention=spec.timing.after_retention,
        chunk=spec.timing.chunk,
    )


def _laid(state: MemoryState) -> StepState:
    def order(weights: Weights) -> tuple[Tensor, ...]:
        return tuple(weights[name] for name in NAMES if name in weights)

    return StepState(
        memory=order(state.memory),
        anchor=order(state.anchor),
        momentum=order(state.momentum),
        window=Pairs(**state.window),
        position=state.position,
    )


def _named(before: MemoryState, state: StepState) -> MemoryState:
    names = [name for name in NAMES if name in before.memory]

    def by_name(weights: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(names, weights, strict=False))  # empty, or one for each name

    window = {n: x for n, x in state.window._asdict().items() if x is not None}
    return replace(
        before,
        memory=by_name(state.memory),
        anchor=by_name(state.anchor),
        momentum=by_name(state.momentum),
        window=window,
        position=state.position,
    )
