"""A matrix memory with a chunk anchor: descent or momentum, window, gates, learned start."""

from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes, check_words
from atlas_lm.ops.linear_memory.parallel import linear_memory_parallel
from atlas_lm.ops.linear_memory.record import LinearState, Problem
from atlas_lm.ops.linear_memory.reference import linear_memory_reference
from atlas_lm.ops.sequences import lay_sequences

__all__ = ["LinearState", "linear_memory", "why_not_sizes"]

CHUNKS = (16, 32, 64)  # tokens per chunk that kernels take
WIDEST = 256  # features and values
# More features than WIDE with windows longer than SHORT: Triton 3.6 with its own assembler, ptxas 12.8, makes
# kernels of it that read where they may not (docs/kernels.md, section 4).
WIDE, SHORT = 128, 17


def linear_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    *,
    log_alpha: Tensor | None = None,
    theta: Tensor | None = None,
    gamma: Tensor | None = None,
    memory: Tensor | None = None,
    momentum: Tensor | None = None,
    chunk: int = 64,
    objective: Literal["l2", "dot"] = "l2",
    past: Tensor | None = None,
    length: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Literal["auto", "fused", "parallel", "reference"] = "auto",
    keep: Literal["states", "checkpoints"] = "states",
) -> tuple[Tensor, LinearState]:
    """G_t = sum_j gamma_{t,j} e_{t-j} k_{t-j}^T with errors e = M k - v at the last border (dot: e = -v);
    S_t = theta_t S_{t-1} - eta_t G_t, M_t = alpha_t M_{t-1} + S_t, y_t = M_t q_t.

    Args:
        q: [B, T, H, F]   k: [B, P + T, H, F]   v: [B, P + T, H, V], P pairs before the first token.
        eta: [B, T, H] >= 0   log_alpha: [B, T, H] <= 0; None: nothing is forgotten
        theta: [B, T, H] in [0, 1); None: descent, S_t = -eta_t G_t
        gamma: [B, T, H, c] in [0, 1]; None: a window of one pair, weight 1
        memory, momentum: [N, H, V, F] fp32 before the first token; None: zero
        chunk: tokens that share an anchor; the first token stands on a border.
        past: [B] int, how many of the P pairs exist; None: all   length: [B] int, tokens per row, the
            first ones; None: all   cu_seqlens: [N + 1] borders of sequences packed into one row, P = 0
        form: fused on a CUDA device where a kernel fits, else parallel.
        keep: what the fused backward pass keeps of the forward one: the "states" at all chunk borders,
            or "checkpoints" from which they are walked again.

    Returns: y [B, T, H, V] in the dtype of q, and the state after the last token.

    >>> q = k = torch.eye(4)[None, :, None]
    >>> y, state = linear_memory(q, k, 2 * k, torch.ones(1, 4, 1))
    >>> torch.equal(state.memory[0, 0], 2 * torch.eye(4))
    True
    """
    problem = _problem(
        q, k, v, eta, log_alpha, theta, gamma, memory, momentum, chunk, objective, past, length,
        cu_seqlens, keep,
    )  # fmt: skip
    chosen = choose("linear_memory", form, FORMS, q, lambda: why_not_fused(problem))
    y, state = FORMS[chosen](problem)
    return y.view(*q.shape[:3], v.shape[-1]), state


def _fused(problem: Problem) -> tuple[Tensor, LinearState]:
    from atlas_lm.ops.linear_memory.fused import linear_memory_fused

    return linear_memory_fused(problem)


FORMS = {
    "fused": _fused,
    "parallel": linear_memory_parallel,
    "reference": linear_memory_reference,
}


def why_not_sizes(chunk: int, window: int, features: int, values: int) -> str | None:
    """Why there is no kernel for these sizes; None where there is one."""
    if chunk not in CHUNKS:
        return (
            f"kernels take chunks of {', '.join(map(str, CHUNKS))} tokens, and the chunk is {chunk}"
        )
    if max(features, values) > WIDEST:
        return f"kernels take up to {WIDEST} features and values, got {features} and {values}"
    if window - 1 > chunk:
        return (
            f"kernels take windows up to the chunk and one pair more, got {window} at chunk {chunk}"
        )
    if features > WIDE and window > SHORT:
        return (
            f"with more than {WIDE} features kernels take windows up to {SHORT}, got {features} features "
            f"and a window of {window}"
        )
    return None


def why_not_fused(problem: Problem) -> str | None:
    p = problem
    sizes = why_not_sizes(p.sequences.chunk, p.window, p.q.shape[-1], p.v.shape[-1])
    return sizes or why_not_triton(p.q, p.k, p.v)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    log_alpha: Tensor | None,
    theta: Tensor | None,
    gamma: Tensor | None,
    memory: Tensor | None,
    momentum: Tensor | None,
    chunk: int,
    objective: Literal["l2", "dot"],
    past: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    keep: Literal["states", "checkpoints"],
) -> Problem:
    gates = {"eta": (eta, "B T H"), "log_alpha": (log_alpha, "B T H"), "theta": (theta, "B T H")}
    gates |= {"gamma": (gamma, "B T H C")}
    gates |= {"past": (past, "B"), "length": (length, "B")}
    states = {"memory": (memory, "N H V F"), "momentum": (momentum, "N H V F")}
    rows = {"q": (q, "B T H F"), "k": (k, "B L H F"), "v": (v, "B L H V")}
    given = {n: (x, axes) for n, (x, axes) in (rows | gates | states).items() if x is not None}
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = check_shapes(given, N=count)
    before = sizes["L"] - sizes["T"]
    check_words(sizes, (q, k, v), theta, momentum)
    if objective not in ("l2", "dot") or keep not in ("states", "checkpoints"):
        raise ValueError(
            f"objective is {objective!r} and keep {keep!r}, wanted 'l2' or 'dot', and 'states' or "
            "'checkpoints'"
        )
    sequences = lay_sequences(q, before, chunk, past, length, cu_seqlens)
    inner = torch.promote_types(q.dtype, torch.float32)
    zero = torch.zeros(count, sizes["H"], sizes["V"], sizes["F"], dtype=inner, device=q.device)
    if theta is not None and momentum is None:
        momentum = zero

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.flatten(0, 1).to(inner)

    return Problem(
        q=q.flatten(0, 1),
        k=k.flatten(0, 1),
        v=v.flatten(0, 1),
        eta=eta.flatten(0, 1).to(inner),
        log_alpha=flat(log_alpha),
        theta=flat(theta),
        gamma=flat(gamma),
        memory=zero if memory is None else memory.to(inner),
        momentum=None if theta is None or momentum is None else momentum.to(inner),
        sequences=sequences,
        objective=objective,
        keep=keep,
    )
