"""The doors: `memorize` writes and reads a stretch of tokens, `recall` only reads.

Here inputs are checked, brought to one dtype and laid head-major, and a form is chosen.
"""

from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from atlas_lm.memory import fused, pairs, parallel, reference, step
from atlas_lm.memory.architectures import dense
from atlas_lm.memory.gates import check_gate_values, check_gates, head_major
from atlas_lm.memory.packing import Packing, pack
from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState, check_state, initial_state
from atlas_lm.memory.tokens import Tokens
from atlas_lm.memory.trace import Trace, gate_means
from atlas_lm.ops.backend import say_once
from atlas_lm.ops.checks import check_shapes

Form = Literal["auto", "reference", "parallel", "fused"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@overload
def memorize(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor] | None = ...,
    *,
    valid: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    form: Form = ...,
    trace: Literal[False] = ...,
    check: bool = ...,
) -> tuple[Tensor, MemoryState]: ...


@overload
def memorize(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor] | None = ...,
    *,
    valid: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    form: Form = ...,
    trace: Literal[True],
    check: bool = ...,
) -> tuple[Tensor, MemoryState, Trace]: ...


def memorize(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor] | None = None,
    *,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    trace: bool = False,
    check: bool = True,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Trace]:
    """Write every pair (k_t, v_t) into the memory and read it with q_t right after.

    Args:
        spec: the rule; see `atlas_lm.presets` for named ones.
        weights: outer weights as `spec.init_weights()` makes them.
        state: where the stream stands; None starts anew from the initial memory in `weights`.
        q, k: [B, T, H, K], any float dtype.   v: [B, T, H, V].
        gates: what `spec.gates` declares, e.g. eta [B, T, H] >= 0, log_alpha [B, T, H] <= 0,
            theta [B, T, H] in [0, 1), gamma [B, T, H, c] in [0, 1].
        valid: [B, T] bool; a token that is not valid neither writes, nor ages, nor moves the clock,
            and reads zero. Default: all are.
        cu_seqlens: [N+1] borders of sequences packed into one row, B = 1; the state then has N rows.
        form: "fused" (Triton kernels), "parallel", "reference" (token by token), or "auto": the first
            of these that there is for this spec and device; kernels once they are proven there.
        trace: also return a `Trace` of surprise, norms and gates per token.
        check: look at gate values for their range. Reads them, which on a GPU waits for it.

    Returns: y [B, T, H, V] in the dtype of q, the next state (fp32; fp64 for fp64 inputs), and the
        trace if asked for. The result does not depend on how a stream is cut into calls, nor on
        grad mode.

    >>> from atlas_lm import presets
    >>> spec = presets.build("deltanet", heads=1, key_dim=8, value_dim=8)
    >>> k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8)
    >>> y, state = memorize(spec, spec.init_weights(), None, k, k, v, {"eta": torch.ones(1, 4, 1)})
    >>> torch.allclose(y, v, atol=1e-5)   # step 1 on a unit key stores the value exactly
    True
    """
    gates = {} if gates is None else gates
    checking = not torch.compiler.is_compiling()  # run once eagerly to have inputs checked
    if checking:
        _check_inputs(spec, weights, q, k, v, gates, valid)
    if checking and check:
        check_gate_values(spec.gates, gates, valid)
    chosen: str = _choose(spec, form, (q, k, v), trace)
    packing = None if cu_seqlens is None else pack(cu_seqlens, q.shape[0], q.shape[1])
    as_packed = chosen == "fused" and packing is not None and state is None and valid is None
    if packing is not None and not as_packed:
        q, k, v = packing.spread(q), packing.spread(k), packing.spread(v)
        gates = {name: packing.spread(gate) for name, gate in gates.items()}
        valid = packing.valid if valid is None else packing.valid & packing.spread(valid)
    if valid is not None:  # whatever stands in padding, NaN too, must not reach a product
        q, k, v = _blank(q, valid), _blank(k, valid), _blank(v, valid)
        gates = {name: _blank(gate, valid) for name, gate in gates.items()}

    fresh, dtype, out_dtype = state is None, _inner_dtype(q, k, v), q.dtype
    if state is None:
        rows = packing.valid.shape[0] if packing is not None else q.shape[0]
        state = initial_state(spec, weights, rows, dtype=dtype, device=q.device)
    if checking:
        _check_state_fits(spec, state, q, dtype, None if as_packed else q.shape[0])
    inner = {name: weight.to(dtype) for name, weight in weights.items()}
    heads = {name: head_major(gate.to(dtype)) for name, gate in gates.items()}
    operands = _operand_dtype(q, k, v) if chosen == "fused" else dtype
    q, k, v = (head_major(x.to(operands)) for x in (q, k, v))
    tokens = Tokens(q, k, v, heads, valid)
    borders = cu_seqlens if as_packed else None
    with torch.autocast(q.device.type, enabled=False):
        if form == "auto" and q.is_cuda and tokens.count == 1:
            lifted = tokens.to(dtype)  # the step kernel is bound by its states, not by products
            if step.declines(spec, inner, state, lifted, trace) is None:
                chosen, tokens = "step", lifted
        y, state, norms = _run(chosen, spec, inner, state, tokens, trace, fresh, borders)
    # a file keeps values, not strides, and strides alone can move the rounding
    state = state.map(Tensor.contiguous)
    y = _outward(y.to(out_dtype), None if as_packed else packing)
    if not trace:
        return y, state
    means = {n: _outward(mean, packing) for n, mean in gate_means(tokens.gates, valid).items()}
    seen = {n: _outward(norm, packing) for n, norm in norms.items()}
    return y, state, Trace(gates=means, **({"momentum_norm": None} | seen))  # type: ignore[arg-type]


def _run(
    chosen: str,
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    state: MemoryState,
    tokens: Tokens,
    trace: bool,
    fresh: bool,
    borders: Tensor | None,
) -> tuple[Tensor, MemoryState, dict[str, Tensor]]:
    """y [B, H, T, V], the next state, and norms if a trace is asked for. borders: the row is packed"""
    if chosen == "step":
        return *step.run(spec, weights, state, tokens), {}
    if chosen == "fused" and borders is not None:
        return *fused.run_packed(spec, weights, state, tokens, borders), {}
    if chosen == "fused":
        return *fused.run(spec, weights, state, tokens, fresh), {}
    if chosen == "parallel":
        return parallel.run(spec, weights, state, tokens, trace, fresh)
    return reference.run(spec, weights, state, tokens, trace)


def recall(
    spec: MemorySpec, weights: Mapping[str, Tensor], state: MemoryState, q: Tensor
) -> Tensor:
    """Read the memory as it is, writing nothing: y_t = A(M; phi(q_t)) for every query.

    q: [B, T, H, K]; returns [B, T, H, V] in the dtype of q. The state is unchanged.
    """
    sizes = check_shapes({"q": (q, "B T H K")}, H=spec.heads, K=spec.key_dim)
    _check_floats({"q": q})
    _check_weights(spec, weights)
    dtype = _inner_dtype(q)
    _check_state_fits(spec, state, q, dtype, q.shape[0])
    if sizes["T"] == 0:
        raise ValueError("q has no tokens; pass at least one query")
    inner = {name: weight.to(dtype) for name, weight in weights.items()}
    with torch.autocast(q.device.type, enabled=False):
        x = spec.features(head_major(q.to(dtype)), inner)
        if spec.keeps_pairs:
            y = pairs.read(spec, state.memory, x)
        else:
            y, _ = spec.network.predict(dense(state.memory), x, inner)
    return y.transpose(1, 2).to(q.dtype)


def _choose(
    spec: MemorySpec, form: Form, inputs: tuple[Tensor, ...], trace: bool
) -> Literal["fused", "parallel", "reference"]:
    """The form that runs. What is asked for by name runs or is refused; "auto" says once what it declined."""
    if form == "reference":
        return form
    if form not in ("auto", "fused", "parallel"):
        raise ValueError(f"form is {form!r}, wanted 'auto', 'fused', 'parallel' or 'reference'")
    if form == "fused" or (form == "auto" and inputs[0].is_cuda):
        reason = fused.declines(spec, *inputs, trace=trace)
        if form == "auto":
            reason = reason or fused.unproven(spec)
        if reason is None:
            return "fused"
        if form == "fused":
            raise ValueError(
                f"this call has no fused form: {reason}; use form='parallel' or 'auto'"
            )
        if not spec.keeps_pairs:  # these have no weights that a kernel could hold
            say_once(f"running without kernels: {reason}")
    reason = parallel.declines(spec)
    if reason is None:
        return "parallel"
    if form == "parallel":
        raise ValueError(
            f"this spec has no parallel form: {reason}; use form='reference' or 'auto'"
        )
    say_once(f"running token by token: {reason}")
    return "reference"


def _check_inputs(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    valid: Tensor | None,
) -> None:
    sizes = check_shapes(
        {"q": (q, "B T H K"), "k": (k, "B T H K"), "v": (v, "B T H V")}
        | ({} if valid is None else {"valid": (valid, "B T")}),
        H=spec.heads,
        K=spec.key_dim,
        V=spec.value_dim,
    )
    if sizes["T"] == 0 or sizes["B"] == 0:
        raise ValueError(
            f"q has shape {list(q.shape)}: nothing to write; pass at least one row and one token"
        )
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}, wanted bool; pass e.g. attention_mask.bool()")
    _check_floats({"q": q, "k": k, "v": v, **gates})
    devices = {str(x.device) for x in (q, k, v, *gates.values(), *weights.values())}
    if len(devices) > 1:
        raise ValueError(f"tensors are on {sorted(devices)}, wanted one device; move them together")
    check_gates(spec.gates, gates, sizes)
    _check_weights(spec, weights)


def _check_floats(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{name} is {tensor.dtype}, wanted one of {', '.join(map(str, FLOATS))}; "
                f"cast it first, e.g. {name}.float()"
            )


def _check_weights(spec: MemorySpec, weights: Mapping[str, Tensor]) -> None:
    wanted = spec.weight_shapes
    if weights.keys() != wanted.keys():
        raise ValueError(
            f"weights are {sorted(weights)}, this spec has {sorted(wanted)}; "
            "make them with spec.init_weights()"
        )
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"weight {name} has shape {list(weights[name].shape)}, wanted {list(shape)}; "
                "make them with spec.init_weights() of the same spec"
            )


def _check_state_fits(
    spec: MemorySpec, state: MemoryState, q: Tensor, dtype: torch.dtype, rows: int | None
) -> None:
    check_state(spec, state, rows)
    tensor = next(iter(state.memory.values()))
    if tensor.dtype != dtype or tensor.device != q.device:
        raise ValueError(
            f"the state is {tensor.dtype} on {tensor.device}, inputs want {dtype} on {q.device}; "
            f"call state.to({dtype}) or state.to(q.device) first"
        )


def _inner_dtype(*inputs: Tensor) -> torch.dtype:
    """Fast weights, momentum and scans live in fp32, or fp64 when the inputs do."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _operand_dtype(*inputs: Tensor) -> torch.dtype:
    """Kernels multiply in the inputs' own dtype, or the widest of theirs."""
    dtype = inputs[0].dtype
    for x in inputs[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _outward(x: Tensor, packing: Packing | None) -> Tensor:
    """[B, H, T, ...] -> [B, T, H, ...], joined again if the sequences came packed."""
    x = x.transpose(1, 2)
    return x if packing is None else packing.join(x)


def _blank(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x, 0.0)
