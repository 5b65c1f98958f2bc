"""Tokens one at a time, as fast as memory is read: the step of a whole model as two CUDA graphs.

Two states take turns: one graph reads the first and writes the second, the other graph goes back. So no
state is copied and no position is looked at by the host. The weights of each block are packed once, so
that a step has few and large products; what stands between two memories is one compiled function, which
all layers share.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from atlas_lm.blocks.block import Block
from atlas_lm.blocks.lmm import MemoryAlone
from atlas_lm.layers.memory import MemoryMixer
from atlas_lm.layers.state import LayerState
from atlas_lm.memory import MemorySpec, MemoryState, step
from atlas_lm.memory.tokens import Tokens
from atlas_lm.models.modeling import AtlasForCausalLM, AtlasModel
from atlas_lm.models.state import StreamState

log = logging.getLogger("atlas_lm")
Form = Literal["auto", "plain", "steps", "graphs"]
Token = Any  # ops.memory_step.StepToken
Weights = dict[str, Tensor]
Join = Callable[[Callable[..., Any]], Callable[..., Any]]


class Decoder:
    """One token per row and call, from a state on.

    Args:
        model: with its head (`step` gives logits) or without (`step` gives hidden states). Its weights
            are copied: changes that come later are not seen.
        state: where the streams stand; copied.
        form: "plain" calls the model; "steps" runs the packed step launch by launch; "graphs" replays it;
            "auto": graphs on a GPU where the model's blocks and rule allow it, else plain.
        compiled: in graphs, let torch.compile join the small operations between memories.

    >>> from atlas_lm.models import configure
    >>> model = AtlasForCausalLM(configure("titans", size="tiny")).eval()
    >>> decoder = Decoder(model, model.initial_state(2))
    >>> decoder.step(torch.tensor([1, 2])).shape
    torch.Size([2, 259])
    """

    def __init__(
        self,
        model: AtlasForCausalLM | AtlasModel,
        state: StreamState,
        *,
        form: Form = "auto",
        compiled: bool = True,
    ) -> None:
        self.model = model
        self.form = _choose(model, state, form)
        state = state.detach().clone()
        self._states = [state] if self.form == "plain" else [state, _twin(state)]
        self._now = 0  # which of them is the present one
        self._logits: list[Tensor] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if self.form != "plain":
            self._ids = state.position.new_zeros(state.batch)
            self._steps = Steps(model, _compile if compiled and self.form == "graphs" else _leave)
        if self.form == "graphs":
            self._capture()

    @property
    def batch(self) -> int:
        return self._states[0].batch

    @property
    def state(self) -> StreamState:
        """Where the streams stand, as a value of its own."""
        return self._states[self._now].clone()

    @property
    def bytes_per_step(self) -> int:
        """What a step must move at least: weights once, states read and written, anchors read."""
        state, weights = self._states[0], sum(p.nbytes for p in self.model.parameters())
        anchors = sum(t.nbytes for n, t in state.leaves().items() if ".anchor." in n)
        return int(weights + 2 * state.bytes - anchors)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Read one token per row: ids [B] -> logits [B, vocab], overwritten by the call after the next."""
        if ids.shape != (self.batch,):
            raise ValueError(
                f"ids have shape {list(ids.shape)}, wanted [{self.batch}]: one token per row"
            )
        if self.form == "plain":
            logits, self._states[0] = _plain(self.model, ids, self._states[0])
            return logits
        here, there = self._now, 1 - self._now
        self._ids.copy_(ids)
        self._now = there
        if self.form == "steps":
            return self._steps(self._ids, self._states[here], self._states[there])
        self._graphs[here].replay()
        return self._logits[here]

    @torch.no_grad()
    def reset(self, state: StreamState) -> None:
        """Go on from another state of the same shapes."""
        self._now = 0
        if self.form == "plain":
            self._states = [state.detach().clone()]
            return
        given = state.leaves()
        for name, tensor in self._states[0].leaves().items():
            tensor.copy_(given[name])

    @torch.no_grad()
    def _capture(self) -> None:
        """Warm up from the first state, which a step leaves as it is, then record both directions."""
        first, second = self._states
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._steps(self._ids, first, second)
        torch.cuda.current_stream().wait_stream(stream)
        for before, after in ((first, second), (second, first)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graphs[0].pool() if self._graphs else None):
                self._logits.append(self._steps(self._ids, before, after))
            self._graphs.append(graph)


def unfit(model: AtlasForCausalLM | AtlasModel, state: StreamState) -> str | None:
    """Why the steps of this model cannot be packed; None where they can."""
    base = _base(model)
    for wiring, block in zip(base.config.blocks, base.layers, strict=True):
        mixer = cast(Block, block).mixer
        if not isinstance(mixer, MemoryAlone):
            return f"a packed step knows blocks of kind lmm, and this model has {wiring}"
        memory = cast(MemoryState, state.layers[0].memory)
        reason = step.unfit(mixer.memory.spec, *memory.memory.values())
        if reason is not None:
            return reason
    return None


def _choose(
    model: AtlasForCausalLM | AtlasModel, state: StreamState, form: Form
) -> Literal["plain", "steps", "graphs"]:
    if form not in ("auto", "plain", "steps", "graphs"):
        raise ValueError(f"form is {form!r}, wanted 'auto', 'plain', 'steps' or 'graphs'")
    if form == "plain":
        return form
    reason = unfit(model, state)
    if reason is None and form != "steps" and not state.position.is_cuda:
        reason = f"graphs need a CUDA device, and the state is on {state.position.device.type}"
    if reason is None:
        return "graphs" if form == "auto" else form
    if form != "auto":
        raise ValueError(
            f"this model has no decoding form {form!r}: {reason}; use 'auto' or 'plain'"
        )
    if state.position.is_cuda:
        log.warning("decoding calls the model token by token: %s", reason)
    return "plain"


def _plain(
    model: AtlasForCausalLM | AtlasModel, ids: Tensor, state: StreamState
) -> tuple[Tensor, StreamState]:
    base = _base(model)
    hidden, state = base.read(base.embed_tokens(ids.unsqueeze(1)), state)
    return _head(model, hidden.squeeze(1)), state


class Steps:
    """The single-token step over packed weights. join: makes one operation of a pure function."""

    def __init__(self, model: AtlasForCausalLM | AtlasModel, join: Join) -> None:
        base = _base(model)
        self.model, self.base = model, base
        self.blocks = [_pack(cast(Block, block)) for block in base.layers]
        spec, eps = self.blocks[0].spec, base.config.rms_norm_eps

        def enter(x: Tensor, into: Weights) -> Tensor:
            return _project(eps, x, into)

        def turn(
            x: Tensor, y: Tensor, columns: Tensor, out: Weights, into: Weights
        ) -> tuple[Tensor, Tensor]:
            x = _finish(eps, x, y, columns, out)
            return x, _project(eps, x, into)

        def leave(x: Tensor, y: Tensor, columns: Tensor, out: Weights) -> Tensor:
            return _head(model, base.norm(_finish(eps, x, y, columns, out)))

        def encode(weights: Weights, window: Weights, tokens: Tokens) -> Token:
            return step.encode(spec, weights, window, tokens)

        self.enter, self.turn, self.leave = join(enter), join(turn), join(leave)
        self.encode = join(encode)

    def __call__(self, ids: Tensor, before: StreamState, after: StreamState) -> Tensor:
        """Read the tokens from one state into the other."""
        x, previous, y = self.base.embed_tokens(ids), None, None
        columns: Tensor | None = None
        for block, old, new in zip(self.blocks, before.layers, after.layers, strict=True):
            spec, memory = block.spec, cast(MemoryState, old.memory)
            if previous is None:
                columns = self.enter(x, block.into)
            else:
                x, columns = self.turn(x, y, columns, previous.out, block.into)
            tails = old.tails["conv"], new.tails["conv"]
            tokens, features = step.prepare(spec, columns, *tails, block.gates, block.margin)
            if features is None:
                token = self.encode(block.fast, memory.window, tokens)
            else:
                token = step.encode(spec, block.fast, memory.window, tokens, features)
            y, _ = step.write_and_read(spec, block.fast, memory, token, into=new.memory)
            previous = block
        torch.add(before.position, 1, out=after.position)
        logits: Tensor = self.leave(x, y, columns, cast(_Packed, previous).out)
        return logits


@dataclass(frozen=True)
class _Packed:
    """The weights of a block as its step reads them."""

    spec: MemorySpec
    into: Weights  # from the stream to the columns of a token
    gates: Weights  # from the columns to the token: convolution and gates
    margin: float  # of the gates
    fast: Weights  # outer weights of the memory, fp32
    out: Weights  # from what was read to the next block


@torch.no_grad()
def _pack(block: Block) -> _Packed:
    mixer: MemoryMixer = cast(MemoryAlone, block.mixer).memory
    names = tuple(mixer.spec.gates)
    projections = [mixer.q_proj, mixer.k_proj, mixer.v_proj]
    projections += [cast(nn.Linear, mixer.gates.down[name]) for name in names]
    gates = {"conv": mixer.conv.weight.detach()}
    for name in names:
        gates[f"up.{name}"] = cast(nn.Linear, mixer.gates.up[name]).weight.detach()
        gates[f"bias.{name}"] = getattr(mixer.gates, f"{name}_bias").detach().float()
    into = {
        "norm": block.mixer_norm.weight.detach(),
        "project": torch.cat([p.weight for p in [*projections, mixer.g_proj]]),
    }
    out = {
        "read_norm": mixer.o_norm.weight.detach(),
        "project": mixer.o_proj.weight.detach(),
        "norm": block.mlp_norm.weight.detach(),
        "gate_up": torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]),
        "down": block.mlp.down_proj.weight.detach(),
    }
    fast = {name: weight.detach().float() for name, weight in mixer.weights().items()}
    return _Packed(mixer.spec, into, gates, mixer.gates.margin, fast, out)


def _project(eps: float, x: Tensor, w: Weights) -> Tensor:
    """From the stream x [B, D] to the columns q, k, v, inner values of gates, the gate of the read."""
    return linear(rms_norm(x, x.shape[-1:], w["norm"], eps), w["project"])


def _finish(eps: float, x: Tensor, y: Tensor, columns: Tensor, w: Weights) -> Tensor:
    """From what was read, y [B, H, 1, V], to the stream before the next block."""
    read = rms_norm(y.squeeze(2).to(x.dtype), y.shape[-1:], w["read_norm"], eps).flatten(1)
    gate = columns[:, -read.shape[1] :]
    x = _add(x, linear(read * silu(gate), w["project"]))
    inside, up = linear(rms_norm(x, x.shape[-1:], w["norm"], eps), w["gate_up"]).chunk(2, dim=-1)
    return _add(x, linear(silu(inside) * up, w["down"]))


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, the same to the last bit; through fp32, because torch.compile makes a copy and an addmm of a
    plain sum, and joins this one to the norm behind it."""
    return (x.float() + y.float()).to(x.dtype)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _leave(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _twin(state: StreamState) -> StreamState:
    """Room for the next state; anchors are shared, see `memory.step.twin`."""
    layers = tuple(
        LayerState(
            memory=None if layer.memory is None else step.twin(layer.memory),
            tails={n: torch.empty_like(t) for n, t in layer.tails.items()},
        )
        for layer in state.layers
    )
    return replace(state, layers=layers, position=torch.empty_like(state.position))


def _base(model: AtlasForCausalLM | AtlasModel) -> AtlasModel:
    return model.model if isinstance(model, AtlasForCausalLM) else model


def _head(model: AtlasForCausalLM | AtlasModel, hidden: Tensor) -> Tensor:
    out: Tensor = model.lm_head(hidden) if isinstance(model, AtlasForCausalLM) else hidden
    return out
