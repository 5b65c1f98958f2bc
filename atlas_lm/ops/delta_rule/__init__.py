"""The exact online rule of a matrix memory with a window: every slope is taken just before its token."""

from typing import Literal

from torch import Tensor

from atlas_lm.ops.backend import say_once, unproven, why_not_triton
from atlas_lm.ops.checks import check_shapes
from atlas_lm.ops.delta_rule.parallel import delta_rule_parallel
from atlas_lm.ops.delta_rule.reference import delta_rule_reference

__all__ = ["delta_rule", "delta_rule_parallel", "delta_rule_reference", "why_not_fused"]

FORMS = ("auto", "reference", "parallel", "fused")
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

    >>> import torch
    >>> q, v, eta = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1), torch.ones(1, 2, 1)
    >>> delta_rule(q, q, v, eta, form="parallel")[0].flatten()
    tensor([3., 5.])
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, wanted one of {', '.join(FORMS)}")
    _check(q, k, v, eta, log_alpha, gamma, memory, past, cu_seqlens)
    reason = why_not_fused(q, k, v, gamma) if form in ("auto", "fused") else None
    if form == "fused" and reason:
        raise ValueError(f"the fused delta rule cannot run: {reason}; pass form='auto'")
    if form == "auto":
        reason = reason or unproven(q.shape[-1])
        if reason and q.is_cuda:
            say_once(f"delta_rule runs its parallel form: {reason}")
        form = "parallel" if reason else "fused"
    if form == "fused":
        from atlas_lm.ops.delta_rule.fused import delta_rule_fused as run
    else:
        run = delta_rule_reference if form == "reference" else delta_rule_parallel
    return run(
        q, k, v, eta,
        log_alpha=log_alpha, gamma=gamma, memory=memory, after_retention=after_retention,
        past=past, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def why_not_fused(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> str | None:
    """Why the kernels cannot take these tensors; None: they can."""
    window = 1 if gamma is None else gamma.shape[-1]
    if window > LONGEST:
        return f"the window is {window}, kernels hold at most {LONGEST}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"keys have {q.shape[-1]} features and values {v.shape[-1]}, kernels hold {WIDEST}"
    if len({x.dtype for x in (q, k, v)}) > 1:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, kernels take one dtype"
    return why_not_triton(q, k, v)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    log_alpha: Tensor | None,
    gamma: Tensor | None,
    memory: Tensor | None,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    shapes = {"q": (q, "B T H F"), "k": (k, "B S H F"), "v": (v, "B S H V"), "eta": (eta, "B T H")}
    if log_alpha is not None:
        shapes["log_alpha"] = (log_alpha, "B T H")
    if gamma is not None:
        shapes["gamma"] = (gamma, "B T H C")
    if past is not None:
        shapes["past"] = (past, "B")
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = check_shapes(shapes)
    if memory is not None:
        check_shapes({"memory": (memory, "N H V F")}, N=count, **sizes)
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
    if cu_seqlens is not None:
        first, end = cu_seqlens[[0, -1]].tolist()
        if (first, end) != (0, sizes["T"]):
            raise ValueError(
                f"cu_seqlens runs from {first} to {end}, wanted 0 to {sizes['T']}; "
                "every token belongs to a sequence"
            )
