"""The exact online rule of a matrix memory with a window: every slope is taken just before its token."""

from typing import Literal

import torch
from torch import Tensor

from atlas_lm.ops.backend import choose, why_not_triton
from atlas_lm.ops.checks import check_shapes
from atlas_lm.ops.delta_rule.parallel import delta_rule_parallel
from atlas_lm.ops.delta_rule.record import Problem
from atlas_lm.ops.delta_rule.reference import delta_rule_reference

__all__ = ["LONGEST", "delta_rule"]

WIDEST, LONGEST = 256, 4  # features and values, and window, that the kernels hold


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    *,
    log_alpha: Tensor | None = None,
    gamma: Tensor | None = None,
    memory: Tensor | None = None,
    after_retention: bool = False,
    past: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Literal["auto", "reference", "parallel", "fused"] = "auto",
) -> tuple[Tensor, Tensor]:
    """M_t = alpha_t M_{t-1} - eta_t sum_{j<c} gamma_{t,j} (P_t k_{t-j} - v_{t-j}) k_{t-j}^T, y_t = M_t q_t.

    P_t is M_{t-1}, or alpha_t M_{t-1} with after_retention: where the slopes of token t are taken.
    q: [B, T, H, F]   k: [B, P+T, H, F]   v: [B, P+T, H, V], P = 0 or c - 1 pairs before the first token
    eta, log_alpha: [B, T, H], log_alpha <= 0, None: alpha = 1   gamma: [B, T, H, c], None: c = 1, weight 1
    memory: [N, H, V, F], before the first token; None: zero
    past: [B] integers, how many of the P pairs exist; None: all
    cu_seqlens: [N+1], borders of sequences packed into one row (B = 1, P = 0)
    form: "reference", "parallel", "fused", or "auto": fused where it fits
    Returns y [B, T, H, V] in the dtype of q and the memory after the last token, [N, H, V, F] fp32.

    >>> q, v, eta = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1), torch.ones(1, 2, 1)
    >>> delta_rule(q, q, v, eta, form="parallel")[0].flatten()
    tensor([3., 5.])
    """
    problem = _problem(q, k, v, eta, log_alpha, gamma, memory, after_retention, past, cu_seqlens)
    chosen = choose("delta_rule", form, FORMS, q, lambda: why_not_fused(problem))
    return FORMS[chosen](problem)


def _fused(problem: Problem) -> tuple[Tensor, Tensor]:
    from atlas_lm.ops.delta_rule.fused import delta_rule_fused

    return delta_rule_fused(problem)


FORMS = {"fused": _fused, "parallel": delta_rule_parallel, "reference": delta_rule_reference}


def why_not_fused(problem: Problem) -> str | None:
    """Why the kernels cannot take these tensors; None: they can."""
    p = problem
    if p.window > LONGEST:
        return f"the window is {p.window}, kernels hold at most {LONGEST}"
    features, values = p.q.shape[-1], p.v.shape[-1]
    if max(features, values) > WIDEST:
        return f"keys have {features} features and values {values}, kernels hold {WIDEST}"
    if len({x.dtype for x in (p.q, p.k, p.v)}) > 1:
        return f"q, k, v are {p.q.dtype}, {p.k.dtype}, {p.v.dtype}, kernels take one dtype"
    return why_not_triton(p.q, p.k, p.v)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    log_alpha: Tensor | None,
    gamma: Tensor | None,
    memory: Tensor | None,
    after_retention: bool,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Problem:
    rows = {"q": (q, "B T H F"), "k": (k, "B S H F"), "v": (v, "B S H V"), "eta": (eta, "B T H")}
    gates = {"log_alpha": (log_alpha, "B T H"), "gamma": (gamma, "B T H C"), "past": (past, "B")}
    states = {"memory": (memory, "N H V F")}
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    given = {n: (x, axes) for n, (x, axes) in (rows | gates | states).items() if x is not None}
    sizes = check_shapes(given, N=count)
    before, window = sizes["S"] - sizes["T"], sizes.get("C", 1)
    if before not in (0, window - 1):
        raise ValueError(
            f"k and v hold {before} pairs before the first token, wanted 0 or {window - 1}; "
            "pass the window's last pairs, and `past` where fewer exist"
        )
    if cu_seqlens is not None and (sizes["B"] != 1 or before):
        raise ValueError(
            f"cu_seqlens came with {sizes['B']} rows and {before} pairs before the first token, "
            "wanted 1 and 0; pack the sequences into one row"
        )
    inner = torch.promote_types(q.dtype, torch.float32)
    if memory is None:
        memory = q.new_zeros(count, sizes["H"], sizes["V"], sizes["F"], dtype=inner)
    return Problem(
        q, k, v, eta, log_alpha, gamma, memory.to(inner), after_retention, past, cu_seqlens
    )
