"""A row of titans-pytorch 0.5.5: its memory comes as a whole layer, and is timed as one."""

from typing import Any

import torch

from benchmarks.kernel_bench.cases import Case, Passes, Tensors, Tokens
from benchmarks.kernel_bench.counts import CHUNK, muon_flops, passes, total
from benchmarks.kernel_bench.inputs import Draw, learned
from benchmarks.kernel_bench.peers import BASE, found

CAUTION = (
    "a layer, projections and norms included; momentum, decay and step per chunk, every slope at the first "
    "weights: other numbers than ours, timed only"
)


def width(shape: Tokens) -> int:
    return shape.heads * shape.features


def layer(heads: int, features: int, hidden: int) -> Any:
    """Its defaults but for the sizes, and unit keys and queries; all of it in bf16."""
    torch.manual_seed(0)
    model = found("titans_pytorch", "MemoryMLP")(features, 2, hidden / features)
    memory = found("titans_pytorch", "NeuralMemory")(
        heads * features,
        CHUNK,
        dim_head=features,
        heads=heads,
        model=model,
        qk_rmsnorm=True,
    )
    return memory.bfloat16()


class Layer:
    """The calls; `draw` makes the layer of a shape, whose weights are inputs like x."""

    module: Any = None

    def draw(self, shape: Tokens, device: torch.device) -> Tensors:
        self.module = layer(shape.heads, shape.features, shape.hidden)
        weights = {n: w.to(device) for n, w in self.module.named_parameters()}
        x = Draw(device).normal(shape.batch, shape.tokens, width(shape)).bfloat16()
        return learned(x=x, **weights)

    def call(self, inputs: Tensors) -> Tensors:
        weights = {n: w for n, w in inputs.items() if n != "x"}
        y, _ = torch.func.functional_call(self.module, weights, (inputs["x"],))
        return {"y": y}

    def release(self) -> None:
        self.module = None


def flops(shape: Tokens) -> Passes:
    """q, k, v and the output, D D a token each; a memory that moves once in a chunk."""
    projections = passes(2 * 4 * shape.count * width(shape) ** 2)
    return total(projections, muon_flops(shape, period=CHUNK, steps=0))


def bytes_of(shape: Tokens) -> Passes:
    """x, y and four projections, bf16."""
    tokens, weights = 2 * shape.count * width(shape), 2 * 4 * width(shape) ** 2
    return Passes(2 * tokens + weights, 5 * tokens + 3 * weights)


def titans_case() -> Case:
    one = Layer()
    return Case(
        name="titans-pytorch layer",
        group="deep_peers",
        shapes=(Tokens(4, 4096, heads=16, features=64, values=64, hidden=256),),
        small=Tokens(2, 128, heads=2, features=64, values=64, hidden=256),
        draw=one.draw,
        call=one.call,
        truth=one.call,
        flops=flops,
        bytes=bytes_of,
        caution=lambda: CAUTION,
        base=BASE,
        release=one.release,
        peer=True,
    )


TITANS = titans_case()
