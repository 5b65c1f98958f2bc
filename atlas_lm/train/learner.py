"""What is trained: a model with its loss inside, so that sharding and compiling find one forward pass."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel
from transformers.utils import logging

from atlas_lm.layers.gates import Gates
from atlas_lm.memory import Trace
from atlas_lm.models import AtlasConfig, AtlasForCausalLM, AtlasModel
from atlas_lm.models.rows import arrange
from atlas_lm.models.state import StreamState
from atlas_lm.ops.linear_cross_entropy import linear_cross_entropy
from atlas_lm.train.parts import Part
from atlas_lm.train.recipe import Recipe

LOGITS = 1 << 27  # that exist at once; with more of them the head runs tile by tile
FOREVER = 10_000.0  # the longest wave of the auto-encoder's positions


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a model said in one part."""

    nats: Tensor  # fp32: [M], at each place; [], their sum, while training
    right: Tensor | None  # [M] bool; None while training
    state: StreamState | None  # after the part, its gradient cut
    opened: Tensor | None = (
        None  # while training with a margin: the mean share that gates were open
    )


@dataclass(frozen=True)
class Watch:
    """A model's insides, filled while it reads a part."""

    traces: list[list[Trace]]  # of each block
    hidden: list[Tensor]  # the input of each block, then what the model says of all


class LanguageLearner(nn.Module):
    """A language model: says the next token."""

    def __init__(self, config: AtlasConfig, priced: bool = False) -> None:
        """priced: tell while training how far gates are open."""
        super().__init__()
        self.model = AtlasForCausalLM(config)
        self.priced = priced
        for module in self._gates():
            module.priced = priced

    @property
    def backbone(self) -> AtlasModel:
        return self.model.model

    def _gates(self) -> list[Gates]:
        return [module for module in self.backbone.modules() if isinstance(module, Gates)]

    def _opened(self) -> Tensor:
        """How far the gates of all memories were open in the last part; it is told once."""
        found = [gates.opened for gates in self._gates() if gates.opened is not None]
        for gates in self._gates():
            gates.opened = None
        return torch.stack(found).mean()

    def forward(self, part: Part, state: StreamState | None, watch: Watch | None = None) -> Said:
        """Read a part and say what follows at its places."""
        x, after = _read(self.backbone, part, state, watch)
        spoken = x.flatten(0, 1).index_select(0, part.places)
        nats, right = self._speak(spoken, part.wanted)
        opened = self._opened() if self.priced and self.training else None
        return Said(nats=nats, right=right, state=after.detach(), opened=opened)

    def _speak(self, x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """x: [M, D]. Logits of large vocabularies are made tile by tile."""
        weight = self.model.lm_head.weight
        if self.training:
            return linear_cross_entropy(x, weight, wanted)[0], None
        tile = max(1, LOGITS // len(weight))
        found = [
            _nats_and_right(x[i : i + tile], weight, wanted[i : i + tile])
            for i in range(0, max(1, len(x)), tile)
        ]
        nats, right = zip(*found, strict=True)
        return torch.cat(nats), torch.cat(right)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the model as transformers does; weights: whole ones by name, of this module."""
        named = {name.removeprefix("model."): weight for name, weight in weights.items()}
        _save(self.model, folder, named)


class AutoEncoder(nn.Module):
    """A model that says a whole row from the encoding of its last token, as MAD's compression wants it.

    The decoder sees that encoding and a position, nothing else, and widens nothing.
    """

    def __init__(self, config: AtlasConfig, length: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.encoder = AtlasModel(config)
        self.decoder = nn.Sequential(
            nn.RMSNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.RMSNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.RMSNorm(width),
            nn.Linear(width, config.vocab_size),
        )
        self.register_buffer("positions", _waves(length, width))

    @property
    def backbone(self) -> AtlasModel:
        return self.encoder

    def forward(self, part: Part, state: StreamState | None, watch: Watch | None = None) -> Said:
        """Read whole rows and say their tokens at the places."""
        x, _ = _read(self.encoder, part, None, watch)
        rows, columns = part.places // x.shape[1], part.places % x.shape[1]
        positions: Tensor = self.positions  # type: ignore[assignment]
        logits = self.decoder(x[:, -1][rows] + positions[columns]).float()
        right = None if self.training else logits.argmax(-1) == part.wanted
        reduction = "sum" if self.training else "none"
        nats = cross_entropy(logits, part.wanted, reduction=reduction)
        return Said(nats=nats, right=right, state=None)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the encoder, which is all that others could use."""
        head = "encoder."
        named = {n.removeprefix(head): w for n, w in weights.items() if n.startswith(head)}
        _save(self.encoder, folder, named)


Learner = LanguageLearner | AutoEncoder


def build_learner(recipe: Recipe) -> Learner:
    """The module of a recipe with its first weights."""
    torch.manual_seed(recipe.seed)
    if recipe.head == "next token":
        learner = LanguageLearner(recipe.model, priced=recipe.price > 0)
        if recipe.start is not None:
            begin_with(learner.model, recipe.start)
        return learner
    lengths = {length for _, length in recipe.shapes()}
    return AutoEncoder(recipe.model, max(lengths))


@torch.no_grad()
def begin_with(model: AtlasForCausalLM, folder: str) -> None:
    """Give a model the weights of another, whose rule may have other gates.

    Gates that only one of both has, and biases of steps where only one of both has a margin, begin as usual.
    """
    logging.disable_progress_bar()
    other = AtlasForCausalLM.from_pretrained(folder, local_files_only=True)
    mine, given = model.state_dict(), other.state_dict()
    if model.config.gate_margin != other.config.gate_margin:
        given = {name: w for name, w in given.items() if not name.endswith(".gates.eta_bias")}
    wrong = [n for n in mine.keys() ^ given.keys() if ".gates." not in n]
    wrong += [n for n in mine.keys() & given.keys() if mine[n].shape != given[n].shape]
    if wrong:
        raise ValueError(
            f"the model in {folder} differs in more than its gates, e.g. in {min(wrong)}; give one of the "
            "same sizes and blocks"
        )
    for name in mine.keys() & given.keys():
        mine[name].copy_(given[name])


def _read(
    model: AtlasModel, part: Part, state: StreamState | None, watch: Watch | None
) -> tuple[Tensor, StreamState]:
    x = model.embed_tokens(part.inputs)
    traces, hidden = (None, None) if watch is None else (watch.traces, watch.hidden)
    if part.borders is None:
        y, after = model.read(x, state, part.count, traces, hidden, part.fresh)
        if hidden is not None:
            hidden.append(y)
        return y, after
    rows = arrange(1, part.inputs.numel(), None, part.borders)
    y, after = model.read(
        rows.spread(x.flatten(0, 1).unsqueeze(0)), None, rows.count, traces, hidden
    )
    return rows.join(y), after


def _save(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights)


def _nats_and_right(x: Tensor, weight: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    logits = linear(x, weight).float()
    return cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted


def _waves(length: int, width: int) -> Tensor:
    """Sines and cosines of positions [T, D]."""
    rates = FOREVER ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
