"""What every memory of a model did at every token of a text."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas_lm.memory import MemorySpec, Trace
from atlas_lm.models.modeling import AtlasForCausalLM, check_ids
from atlas_lm.stream.reading import Reading

STRIDE = 512  # tokens per call of the model; changes no result beyond rounding


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One block: by name one number per token, [T] fp32 on the CPU, averaged over heads.

    surprise: |G_t|, the size of the gradient.  write: eta_t |G_t|, what this token pushes.
    retention: alpha_t, what is left of the memory; absent where a rule never forgets.
    memory: |M_t| after the write.  momentum: |S_t|, absent where a rule has none.
    surprise_max, write_max: of the head where it is largest.
    """

    wiring: str
    seen: dict[str, Tensor]  # empty: this block has no memory


@dataclass(frozen=True, kw_only=True)
class Record:
    ids: Tensor  # [T] int64
    loss: Tensor  # [T] fp32, -log p of each token in nats; NaN where nothing was read before it
    layers: tuple[LayerRecord, ...]
    start: int  # tokens of the stream before the first of these

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON, which has none that are not finite: these become None."""
        return {
            "start": self.start,
            "ids": self.ids.tolist(),
            "loss": _plain(self.loss),
            "layers": [
                {"wiring": one.wiring} | {name: _plain(values) for name, values in one.seen.items()}
                for one in self.layers
            ],
        }


def observe(
    model: AtlasForCausalLM,
    ids: Tensor,
    *,
    reading: Reading | None = None,
    stride: int = STRIDE,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Record:
    """Let the model read and record what its memories do.

    Memory stays constant but for the record itself: the text is read in strides.

    Args:
        ids: [T] int64.
        reading: the stream that these tokens continue; it is not changed. None: a new one begins.
        stride: tokens per call; of a reading, its own is taken.
        advance: told after every call how many tokens it read.
    """
    specs = model.config.layer_specs
    if all(spec is None for spec in specs):
        raise ValueError(
            f"this model has no memory to watch, its blocks are {sorted(set(model.config.blocks))}; "
            "choose one with lmm, mal, mag or mac blocks"
        )
    if ids.dim() != 1 or not len(ids):
        raise ValueError(f"ids have shape {list(ids.shape)}, wanted [T] with at least one token")
    check_ids(ids, model.config.vocab_size)
    state, start, before = None, 0, ids.new_empty(0)
    if reading is not None:
        state, start, before, stride = (
            reading.state,
            reading.tokens,
            reading.pending,
            reading.stride,
        )
    losses, strides, last = [], [], None
    with torch.no_grad():
        for piece in torch.cat([before.to(ids), ids]).to(model.device).split(stride):
            watch: list[list[Trace]] = [[] for _ in specs]
            embedded = model.model.embed_tokens(piece.unsqueeze(0))
            hidden, state = model.model.read(embedded, state, None, watch=watch)
            logits = model.lm_head(hidden)[0].float()
            losses.append(_losses(logits, piece, last))
            strides.append([_layer(s, w, len(piece)) for s, w in zip(specs, watch, strict=True)])
            last = logits[-1:]
            advance(len(piece))
    layers = tuple(
        LayerRecord(
            wiring=wiring,
            seen={
                n: torch.cat([one[i][n] for one in strides])[len(before) :] for n in strides[0][i]
            },
        )
        for i, wiring in enumerate(model.config.blocks)
    )
    return Record(ids=ids, loss=torch.cat(losses)[len(before) :], layers=layers, start=start)


def _losses(logits: Tensor, ids: Tensor, last: Tensor | None) -> Tensor:
    """-log p of each token under the logits of the token before it. last: those of the stride before."""
    known = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
    found = torch.full((len(ids),), math.nan)
    if len(known):
        expected = ids[len(ids) - len(known) :]
        loss = torch.nn.functional.cross_entropy(known, expected, reduction="none")
        found[len(ids) - len(known) :] = loss.cpu()
    return found


def _layer(spec: MemorySpec | None, traces: list[Trace], tokens: int) -> dict[str, Tensor]:
    """The quantities of one block over one stride; a new stream has persistent tokens in front."""
    if spec is None:
        return {}
    pieces = [_quantities(spec, trace) for trace in traces]
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return {name: values[len(values) - tokens :] for name, values in joined.items()}


def _quantities(spec: MemorySpec, trace: Trace) -> dict[str, Tensor]:
    """[T] each, from a trace of one row [1, T, H]."""
    surprise = trace.surprise[0]
    write = (
        surprise * spec.optimizer.rate(trace.gates, torch.ones_like(trace.surprise))[0]
    )  # unit keys
    found = {
        "surprise": surprise.mean(-1),
        "surprise_max": surprise.amax(-1),
        "write": write.mean(-1),
        "write_max": write.amax(-1),
        "memory": trace.memory_norm[0].mean(-1),
    }
    if "alpha" in trace.gates:
        found["retention"] = trace.gates["alpha"][0].mean(-1)
    if trace.momentum_norm is not None:
        found["momentum"] = trace.momentum_norm[0].mean(-1)
    return {name: values.float().cpu() for name, values in found.items()}


def _plain(values: Tensor) -> list[float | None]:
    return [float(f"{x:.6g}") if math.isfinite(x) else None for x in values.tolist()]
