"""Rows of decoding: one token of 64 streams through a 340M model, early and late in the streams."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from atlas_lm.memory.architectures import Matrix
from benchmarks.kernel_bench.cases import Case, Passes, Streams, Tensors
from benchmarks.kernel_bench.peers import found

SIZE, VOCABULARY, BATCH = "340M", 32000, 64
EARLY, LATE = Streams(BATCH, 1_000), Streams(BATCH, 1_000_000)
START = Streams(BATCH, 0, steps=3)


class Decoding:
    """The calls of one rule. Its decoder keeps the streams; `draw` sets them to the place of a shape."""

    def __init__(self, preset: str, **memory: Any) -> None:
        self.preset, self.memory = preset, memory
        self.model: Any = None
        self.decoder: Any = None

    @property
    def config(self) -> Any:
        configure = found("atlas_lm.models", "configure")
        return configure(self.preset, size=SIZE, memory=dict(self.memory), vocab_size=VOCABULARY)

    def build(self, device: torch.device) -> Any:
        torch.manual_seed(0)
        with device:
            return found("atlas_lm.models", "AtlasForCausalLM")(self.config).bfloat16().eval()

    @torch.no_grad()
    def draw(self, shape: Streams, device: torch.device) -> Tensors:
        """ids [steps, B]; the graphs are captured once, as all shapes have the same batch."""
        if self.model is None:
            self.model = self.build(device)
        state = at(self.model.initial_state(shape.batch), shape.position)
        if self.decoder is None:
            decoder = found("atlas_lm.models.decoding", "Decoder")
            self.decoder = decoder(self.model, state, form="graphs")
        else:
            self.decoder.reset(state)
        return dict(ids=torch.randint(VOCABULARY, (shape.steps, shape.batch), device=device))

    def release(self) -> None:
        """Also what was compiled: Dynamo keeps only a few versions of one function."""
        self.model = self.decoder = None
        torch.compiler.reset()

    @torch.no_grad()
    def call(self, inputs: Tensors) -> Tensors:
        for ids in inputs["ids"]:
            logits = self.decoder.step(ids)
        return dict(logits=logits)

    def plain(self, inputs: Tensors) -> Tensors:
        return read(self.model, inputs["ids"])

    def truth(self, inputs: Tensors) -> Tensors:
        return read(copy.deepcopy(self.model).double(), inputs["ids"])

    @cache  # noqa: B019
    def traffic(self, batch: int) -> int:
        """Bytes of a step: weights read once (of the embedding the head's use of it), states read and
        written once, anchors only read: they are written once per chunk."""
        model = self.build(torch.device("meta"))
        weights = sum(w.numel() * w.element_size() for w in model.parameters())
        leaves = model.initial_state(batch).leaves()
        states = sum(
            x.numel() * x.element_size() * (1 if ".anchor." in name else 2)
            for name, x in leaves.items()
        )
        return weights + states

    def bytes(self, shape: Streams) -> Passes:
        moved = self.traffic(shape.batch) * shape.steps
        return Passes(moved, moved)

    def flops(self, shape: Streams) -> Passes:
        """All matrix products of the model, the memory token by token."""
        per_token = found("atlas_lm.models.counts", "flops_per_token")(self.config, 1)["total"]
        return Passes(per_token * shape.count, per_token * shape.count)


def at(state: Any, position: int) -> Any:
    """The state as if it had read so many tokens: all its integers are positions."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else torch.full_like(tensor, position)

    return state.map(move)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Tensors:
    """Logits after the last of ids [steps, B], token by token without a graph."""
    cache = found("atlas_lm.models", "AtlasCache")()
    for one in ids:
        logits = model(input_ids=one[:, None], past_key_values=cache).logits[:, -1]
    return dict(logits=logits)


def decode_case(name: str, decoding: Decoding) -> Case:
    """Its base is itself early in the streams: a late token must cost the same."""
    return Case(
        name=f"decode {name}",
        group="decode",
        shapes=(EARLY, LATE),
        small=START,
        draw=decoding.draw,
        call=decoding.call,
        plain=decoding.plain,
        truth=decoding.truth,
        flops=decoding.flops,
        bytes=decoding.bytes,
        base=f"decode {name}",
        base_shape=EARLY,
        backward=False,
        release=decoding.release,
    )


DECODE: tuple[Case, ...] = (
    decode_case("gated_deltanet", Decoding("gated_deltanet")),
    decode_case("titans matrix", Decoding("titans", architecture=Matrix())),
    decode_case("omeganet matrix", Decoding("omeganet", architecture=Matrix())),
    decode_case("titans MLP", Decoding("titans")),
    decode_case("omeganet MLP", Decoding("omeganet")),
)
