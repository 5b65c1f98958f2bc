"""A two-layer memory with a chunk anchor, gated or not: descent, momentum or Muon, window, learned start."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes, check_words
from atlas_lm.ops.mlp_memory.parallel import mlp_memory_parallel
from atlas_lm.ops.mlp_memory.record import MLPState, Muon, Norm, Problem, Weights
from atlas_lm.ops.mlp_memory.reference import mlp_memory_reference
from atlas_lm.ops.mlp_memory.room import SHARED, UNITS, Room, edge_of
from atlas_lm.ops.sequences import lay_sequences

__all__ = ["UNPROVEN", "MLPState", "Muon", "Norm", "Weights", "mlp_memory", "why_not_sizes"]

CHUNKS = (16, 32, 64)  # tokens per chunk that kernels take
# until tests/ops/test_mlp_memory_device.py has passed on a device
UNPROVEN: str | None = (
    "kernels of two-layer memories have not been compared with plain PyTorch on a device yet; form='fused' "
    "asks for them by name"
)
MOST_FEATURES, MOST_HIDDEN, MOST_VALUES = 256, 512, 128


def mlp_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    memory: Weights,
    *,
    log_alpha: Tensor | None = None,
    theta: Tensor | None = None,
    gamma: Tensor | None = None,
    momentum: Weights | None = None,
    start: Weights | None = None,
    chunk: int = 64,
    objective: Literal["l2", "dot"] = "l2",
    activation: Literal["gelu", "silu"] = "gelu",
    skip: bool = False,
    norm: Norm | None = None,
    muon: Muon | None = None,
    past: Tensor | None = None,
    length: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Literal["auto", "fused", "parallel", "reference"] = "auto",
) -> tuple[Tensor, MLPState]:
    """A(M; z) = W1 (s(W0 z) * Wg z), skip: + z; G_t = sum_j gamma_{t,j} d/dM l(A(M; k_{t-j}), v_{t-j}) at the
    last border; S_t = theta_t S_{t-1} - eta_t G_t, M_t = alpha_t M_{t-1} + S_t, y_t = A(M_t; q_t).

    Args:
        q: [B, T, H, F]   k: [B, P + T, H, F]   v: [B, P + T, H, V], P pairs before the first token.
        eta: [B, T, H] >= 0   log_alpha: [B, T, H] <= 0; None: nothing is forgotten
        theta: [B, T, H] in [0, 1); None: descent, S_t = -eta_t G_t
        gamma: [B, T, H, c] in [0, 1]; None: a window of one pair, weight 1
        memory, momentum: fp32 [N, H, ...] before the first token; no momentum: zero
        start: [H, ...], where retention pulls to: M = start + alpha (M - start); None: zero
        chunk: tokens that share an anchor; the first token stands on a border.
        norm: A(M; z) = z + LN(W1 (...)) scale + bias instead
        muon: S_t = theta_t S_{t-1} + G_t, and M moves by -eta_t NS(S_t) at the end of each period alone.
        past, length, cu_seqlens: as `linear_memory` takes them.
        form: auto is parallel until the kernels are proven on a device (`UNPROVEN`).

    Returns: y [B, T, H, V] in the dtype of q, and the state after the last token.
    """
    problem = _problem(
        q, k, v, eta, memory,
        {"log_alpha": log_alpha, "theta": theta, "gamma": gamma},
        {"momentum": momentum, "start": start},
        chunk, objective, activation, skip, norm, muon, past, length, cu_seqlens,
    )  # fmt: skip
    chosen = choose("mlp_memory", form, FORMS, q, lambda: why_not_fused(problem), UNPROVEN)
    y, state = FORMS[chosen](problem)
    return y.view(*q.shape[:3], v.shape[-1]), state


def _fused(problem: Problem) -> tuple[Tensor, MLPState]:
    from atlas_lm.ops.mlp_memory.fused import mlp_memory_fused

    return mlp_memory_fused(problem)


FORMS = {"fused": _fused, "parallel": mlp_memory_parallel, "reference": mlp_memory_reference}


def why_not_sizes(
    chunk: int,
    window: int,
    features: int,
    hidden: int,
    values: int,
    *,
    gated: bool,
    states: int,
    element: int,
) -> str | None:
    """Why there is no kernel for these sizes; None where there is one.

    states: memory, momentum, start, how many there are   element: bytes of a number
    """
    if chunk not in CHUNKS:
        return (
            f"kernels take chunks of {', '.join(map(str, CHUNKS))} tokens, and the chunk is {chunk}"
        )
    if features > MOST_FEATURES or hidden > MOST_HIDDEN or values > MOST_VALUES:
        return (
            f"kernels take up to {MOST_FEATURES} features, {MOST_HIDDEN} hidden units and {MOST_VALUES} "
            f"values, got {features}, {hidden} and {values}"
        )
    if hidden % 16:
        return f"kernels take hidden units in sixteens, got {hidden}"
    if window - 1 > chunk:
        return (
            f"kernels take windows up to the chunk and one pair more, got {window} at chunk {chunk}"
        )
    room = Room(chunk, edge_of(window), features, values, 2 + gated, states, element)
    if room.units(max(UNITS)) is None:
        return (
            f"kernels have {SHARED} bytes on a multiprocessor, and {features} features, {values} values, a "
            f"window of {window} and {states} sets of weights want {room.shared(min(UNITS))}; take bf16, "
            "fewer features or a shorter window"
        )
    return None


def why_not_fused(problem: Problem) -> str | None:
    p = problem
    sizes = why_not_sizes(
        p.sequences.chunk, p.window, *p.sizes, gated=p.memory.gate is not None,
        states=1 + (p.momentum is not None and p.muon is None) + (p.start is not None),
        element=p.q.element_size(),
    )  # fmt: skip
    return sizes or why_not_triton(p.q, p.k, p.v)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    memory: Weights,
    gates: Mapping[str, Tensor | None],
    others: Mapping[str, Weights | None],
    chunk: int,
    objective: Literal["l2", "dot"],
    activation: Literal["gelu", "silu"],
    skip: bool,
    norm: Norm | None,
    muon: Muon | None,
    past: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Problem:
    axes = {"w0": "D F", "w1": "V D", "gate": "D F"}
    given: dict[str, tuple[Tensor | None, str]] = {
        "q": (q, "B T H F"), "k": (k, "B L H F"), "v": (v, "B L H V"), "eta": (eta, "B T H"),
        "log_alpha": (gates["log_alpha"], "B T H"), "theta": (gates["theta"], "B T H"),
        "gamma": (gates["gamma"], "B T H C"), "past": (past, "B"), "length": (length, "B"),
        "norm.scale": (norm and norm.scale, "H V"), "norm.bias": (norm and norm.bias, "H V"),
    }  # fmt: skip
    for name, weights in {"memory": memory, **others}.items():
        rows = "H" if name == "start" else "N H"
        for n, w in ({} if weights is None else weights._asdict()).items():
            given[f"{name}.{n}"] = (w, f"{rows} {axes[n]}")
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = check_shapes({n: (x, a) for n, (x, a) in given.items() if x is not None}, N=count)
    theta, momentum, start = gates["theta"], others["momentum"], others["start"]
    check_words(sizes, (q, k, v), theta, momentum)
    _check_options(sizes, objective, activation, skip or norm is not None, muon, theta, chunk)
    for name, other in others.items():
        if other is not None and (other.gate is None) != (memory.gate is None):
            raise ValueError(f"{name} and memory must both have a gate, or neither")
    sequences = lay_sequences(q, sizes["L"] - sizes["T"], chunk, past, length, cu_seqlens)
    inner = torch.promote_types(q.dtype, torch.float32)
    if theta is not None and momentum is None:
        momentum = memory.map(torch.zeros_like)

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.flatten(0, 1).to(inner)

    def cast(weights: Weights | None) -> Weights | None:
        return None if weights is None else weights.map(lambda w: w.to(inner))

    return Problem(
        q=q.flatten(0, 1),
        k=k.flatten(0, 1),
        v=v.flatten(0, 1),
        eta=eta.flatten(0, 1).to(inner),
        log_alpha=flat(gates["log_alpha"]),
        theta=flat(theta),
        gamma=flat(gates["gamma"]),
        memory=memory.map(lambda w: w.to(inner)),
        momentum=cast(momentum),
        start=cast(start),
        sequences=sequences,
        objective=objective,
        activation=activation,
        skip=skip,
        norm=norm and Norm(*(w.to(inner) for w in norm)),
        muon=muon,
    )


def _check_options(
    sizes: Mapping[str, int],
    objective: str,
    activation: str,
    skip: bool,
    muon: Muon | None,
    theta: Tensor | None,
    chunk: int,
) -> None:
    if objective not in ("l2", "dot") or activation not in ("gelu", "silu"):
        raise ValueError(
            f"objective is {objective!r} and activation {activation!r}, wanted 'l2' or 'dot', and 'gelu' "
            "or 'silu'"
        )
    if skip and sizes["F"] != sizes["V"]:
        raise ValueError(
            f"skip and norm add the {sizes['F']} features to {sizes['V']} values; wanted as many, or neither"
        )
    if muon is not None and theta is None:
        raise ValueError("muon came without theta; its momentum needs one, zeros for none")
    if muon is not None and chunk % muon.period:
        raise ValueError(
            f"the chunk of {chunk} tokens is no multiple of Muon's period of {muon.period}; pass one that is"
        )
