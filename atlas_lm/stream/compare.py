"""How far two memories lie apart: in their tensors, and in what a model predicts with them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_lm.models import AtlasCache, AtlasForCausalLM
from atlas_lm.stream.reading import Reading

ROWS = 64  # predictions compared at once, in fp64


@dataclass(frozen=True)
class Change:
    """What a second memory changes in the predictions over a text, the first one being the truth."""

    tokens: int  # of the text; a prediction is made after each
    mean_kl: float  # nats, KL(first || second) of the next token
    max_kl: float
    first_loss: float  # nats per token of the text, from its second on
    second_loss: float
    same_top1: float  # share of predictions with the same most probable token

    @property
    def loss_change(self) -> float:
        return self.second_loss - self.first_loss


def compare_predictions(
    model: AtlasForCausalLM, first: Reading, second: Reading, ids: Iterable[list[int]]
) -> Change:
    """Let the model read a text from two memories, and compare what it predicts after each token.

    The text may be of any length: it is read in strides, and only sums are kept.

    Args:
        ids: the text in pieces of any size, at least two tokens in all.
    """
    sides = [_Side(model, first), _Side(model, second)]
    totals = _Totals()
    for stride in _strides(ids, first.stride):
        logits = [side.read(stride) for side in sides]
        for start in range(0, len(stride), ROWS):
            rows = slice(start, start + ROWS)
            first_rows, second_rows = (one[rows].double().log_softmax(-1) for one in logits)
            totals.add(first_rows, second_rows, stride[rows])
    return totals.change()


class _Side:
    """A model that goes on from a memory."""

    def __init__(self, model: AtlasForCausalLM, reading: Reading) -> None:
        self.model, self.cache = model, AtlasCache(reading.state)
        if len(reading.pending):
            self.read(reading.pending)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Logits after each of ids [n]. -> [n, V]"""
        inputs = ids.unsqueeze(0).to(self.model.device)
        logits: Tensor = self.model(inputs, past_key_values=self.cache).logits
        return logits[0]


class _Totals:
    """Sums over the predictions so far, and the last prediction, whose token is still to come."""

    def __init__(self) -> None:
        self.tokens = self.same = 0
        self.kl = self.most = torch.zeros((), dtype=torch.float64)
        self.loss = torch.zeros(2, dtype=torch.float64)
        self.last: Tensor | None = None

    def add(self, first: Tensor, second: Tensor, ids: Tensor) -> None:
        """first, second: log-probabilities [n, V] after ids [n]."""
        kl = (first.exp() * (first - second)).sum(-1).clamp_min(0).cpu()
        self.kl = self.kl + kl.sum()
        self.most = torch.maximum(self.most, kl.max())
        self.same += int((first.argmax(-1) == second.argmax(-1)).sum())
        self.tokens += len(ids)
        self._lose(torch.stack([first, second]), ids)

    def _lose(self, made: Tensor, ids: Tensor) -> None:
        """The losses of predictions [2, n, V] at the tokens that came next; the last one waits."""
        if self.last is None:
            ids = ids[1:]
        else:
            made = torch.cat([self.last, made], dim=1)
        places = torch.arange(len(ids), device=made.device)
        self.loss -= made[:, places, ids.to(made.device)].sum(-1).cpu()
        self.last = made[:, -1:]

    def change(self) -> Change:
        if self.tokens < 2:
            raise ValueError(
                f"the text has {self.tokens} tokens, wanted 2 or more to compare predictions; give a longer "
                "one"
            )
        first, second = (self.loss / (self.tokens - 1)).tolist()
        kl, same = float(self.kl) / self.tokens, self.same / self.tokens
        return Change(self.tokens, kl, float(self.most), first, second, same)


def _strides(ids: Iterable[list[int]], size: int) -> Iterator[Tensor]:
    """All ids in tensors of `size`, the last one shorter."""
    held: list[int] = []
    for piece in ids:
        held += piece
        while len(held) >= size:
            yield torch.tensor(held[:size])
            held = held[size:]
    if held:
        yield torch.tensor(held)


def relative_distance(first: Tensor, second: Tensor) -> float | None:
    """|first - second| over the larger of both norms, Euclidean; None where shapes differ."""
    if first.shape != second.shape:
        return None
    first, second = first.double(), second.double()
    largest = max(float(first.norm()), float(second.norm()))
    return float((first - second).norm()) / largest if largest else 0.0


def distances(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Relative distance of each tensor of numbers by name; None where only one has it, or shapes differ."""
    both = dict(second) | dict(first)
    names = [name for name, leaf in both.items() if leaf.is_floating_point()]
    return {
        n: relative_distance(first[n], second[n]) if n in first and n in second else None
        for n in sorted(names, key=_by_layer)
    }


def _by_layer(name: str) -> list[tuple[int, str]]:
    """Layer 10 stands behind layer 2."""
    return [(int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


@dataclass(frozen=True)
class LayerNorms:
    """The size of one layer's memory; None: it has none, or there is nothing to compare it with."""

    layer: int
    memory: float | None
    momentum: float | None
    start: float | None  # of the memory before the first token
    moved: float | None  # between that and the memory of now
    bytes: int  # of all that the layer keeps, opened


def layer_norms(
    leaves: Mapping[str, Tensor], layers: int, start: Mapping[str, Tensor] | None = None
) -> list[LayerNorms]:
    """Euclidean norms over all heads and weights of each layer. start: the leaves before the first token"""
    found = []
    for i in range(layers):
        mine = {name: leaf for name, leaf in leaves.items() if name.startswith(f"layers.{i}.")}
        memory = f"layers.{i}.memory.memory."
        begun = None if start is None else _norm(start, memory)
        pairs = {
            n: (leaf, (start or {}).get(n)) for n, leaf in mine.items() if n.startswith(memory)
        }
        moves = {
            n: a - b.cpu() for n, (a, b) in pairs.items() if b is not None and a.shape == b.shape
        }
        found.append(
            LayerNorms(
                layer=i,
                memory=_norm(mine, memory),
                momentum=_norm(mine, f"layers.{i}.memory.momentum."),
                start=begun,
                moved=_norm(moves, memory) if len(moves) == len(pairs) else None,
                bytes=sum(leaf.nbytes for leaf in mine.values()),
            )
        )
    return found


def _norm(leaves: Mapping[str, Tensor], prefix: str) -> float | None:
    """Of all tensors under a prefix, as one vector."""
    found = [leaf.double().norm() for name, leaf in leaves.items() if name.startswith(prefix)]
    return float(torch.stack(found).norm()) if found else None
