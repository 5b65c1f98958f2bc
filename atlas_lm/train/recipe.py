"""A run as a record: the model, what it reads, and how it learns. All that changes results stands here."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from atlas_lm.data.source import Source
from atlas_lm.models import AtlasConfig
from atlas_lm.models.fingerprint import config_record
from atlas_lm.text import Tokenizer

OPTIMIZERS = ("adamw", "muon")
CURVES = ("cosine", "wsd", "constant")
HEADS = ("next token", "auto-encoder")


def _one_of(name: str, got: str, wanted: tuple[str, ...]) -> None:
    if got not in wanted:
        raise ValueError(f"{name} is {got!r}, wanted one of {', '.join(wanted)}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The outer optimizer. Muon moves the matrices of linear maps, AdamW all other weights.

    Muon's step has the size of AdamW's (0.2 sqrt(max(rows, columns)) per matrix), so that one rate serves
    both. Only matrices of linear maps decay.
    """

    kind: str = "adamw"
    rate: float = 1e-3  # at its highest
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8
    decay: float = 0.1
    momentum: float = 0.95  # of Muon
    steps: int = 5  # of Newton-Schulz in Muon
    clip: float = 1.0  # norm of the whole gradient

    def __post_init__(self) -> None:
        _one_of("optimizer", self.kind, OPTIMIZERS)
        if not (self.rate > 0 and self.clip > 0 and self.decay >= 0):
            raise ValueError(
                f"rate is {self.rate}, clip {self.clip} and decay {self.decay}, wanted positive numbers, "
                "decay 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the steps, as a share of its highest value.

    cosine: rises, then falls as a cosine.  wsd: rises, stays, then falls in a straight line (warm-up,
    stable, decay).  constant: rises, then stays.
    """

    curve: str = "cosine"
    warm: float = 0.05  # share of the steps in which it rises
    fall: float = 0.2  # share of the steps in which wsd falls
    floor: float = 0.0  # where it ends

    def __post_init__(self) -> None:
        _one_of("curve", self.curve, CURVES)
        shares = (self.warm, self.fall, self.floor, self.warm + self.fall)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"warm is {self.warm}, fall {self.fall}, floor {self.floor}; wanted shares from 0 to 1, "
                "warm and fall together at most 1"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, whole. `record` is what must be the same for a run to be gone on with."""

    name: str
    model: AtlasConfig
    source: Source
    steps: int
    arguments: dict[str, Any] = field(default_factory=dict)  # of the function that made it
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    # tokens after which the gradient is cut while the memory goes on; None: rows are read whole
    segment: int | None = None
    head: str = "next token"  # auto-encoder: every token of a row is said from its last one
    tokenizer: Tokenizer | None = None  # saved with the model; None: ids are all there is
    # of writing, beside the loss: times the mean share of a step that gates with a margin open. Nothing in
    # the first third of the steps, all in the last: what closes before it is needed is not opened again
    price: float = 0.0
    start: str | None = None  # folder of the model whose weights it begins with; None: new ones
    seed: int = 0  # of the first weights
    exams: int = 10  # times that the run is examined, the end among them
    diverged: float = 1.5  # a loss so many times the first one, for so long, stops the run
    patience: int = 50  # steps

    def __post_init__(self) -> None:
        _one_of("head", self.head, HEADS)
        for name in ("steps", "exams", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.segment is not None and self.segment < 2:
            raise ValueError(f"segment is {self.segment}, wanted 2 tokens or more, or None")
        if self.price < 0 or (self.price and not self.model.gate_margin):
            raise ValueError(
                f"price is {self.price} and the model's gate_margin {self.model.gate_margin}; wanted 0 or "
                "more, and a margin where there is a price: without one no gate can close"
            )
        if self.head != "next token" and (self.price or self.start is not None):
            raise ValueError(
                f"head is {self.head!r} with price {self.price} and start {self.start}; only a model that "
                "says the next token can pay a price or begin with another's weights"
            )
        if self.source.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"the data has ids up to {self.source.vocab_size - 1}, the model only up to "
                f"{self.model.vocab_size - 1}: wrong tokenizer, or too small a vocab_size"
            )
        if self.source.carries and self.model.grows is not None:
            raise ValueError(
                f"rows go on from step to step, but the model has {self.model.grows}, whose state grows "
                "without end; take a source that does not carry, or another model"
            )
        if self.source.carries and self.head != "next token":
            raise ValueError("an auto-encoder has no state to carry; take a source that does not")

    def record(self) -> dict[str, Any]:
        """All of it as JSON."""
        model = config_record(self.model) | {"initializer_range": self.model.initializer_range}
        plain = ("name", "steps", "arguments", "segment", "head", "price", "start", "seed", "exams")
        found = {
            **{name: getattr(self, name) for name in plain},
            "model": model,
            "data": self.source.settings(),
            "optimizer": asdict(self.optimizer),
            "schedule": asdict(self.schedule),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.key,
        }
        return dict(json.loads(json.dumps(found)))

    def price_at(self, step: int) -> float:
        """The price of writing at a step."""
        return self.price * min(1.0, max(0.0, 3 * step / self.steps - 1))

    def exam_steps(self) -> set[int]:
        """Numbers of finished steps at which the model is examined."""
        return {round(self.steps * (i + 1) / self.exams) for i in range(self.exams)} - {0}

    def shapes(self) -> set[tuple[int, int]]:
        """Every (rows, tokens of a row) that occurs."""
        return {self.source.shape(step) for step in range(self.steps)}
