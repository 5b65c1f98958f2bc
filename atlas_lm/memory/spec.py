"""One point of the space: architecture x features x objective with window x optimizer x retention.

A spec is a value: frozen, checked when made, the same before and after JSON.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from atlas_lm.memory.architectures import MLP, Architecture, GatedMLP, KeptPairs, Matrix
from atlas_lm.memory.features import (
    Elementwise,
    Exponential,
    Features,
    Identity,
    Polynomial,
    Sketch,
    Taylor,
    Unit,
)
from atlas_lm.memory.gates import Gate
from atlas_lm.memory.objectives import L2, Dot, Huber, Objective
from atlas_lm.memory.optimizers import (
    Descent,
    ImplicitDescent,
    Momentum,
    Muon,
    Optimizer,
)
from atlas_lm.memory.retention import Decay, DecayToStart, Keep, Renormalise, Retention
from atlas_lm.memory.windows import Window


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happen. Part of the model: a memory trained at chunk 64 is another one at chunk 8."""

    kind: ClassVar[str] = "timing"
    chunk: int = 1  # tokens that share an anchor; 1: the online rule, slopes at M_{t-1}
    period: int = 1  # Newton-Schulz moves the memory once per `period` tokens
    after_retention: bool = False  # take the slope at alpha_t M_{t-1} instead of M_{t-1}

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.period < 1:
            raise ValueError(
                f"timing has chunk {self.chunk} and period {self.period}, wanted 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """A rule and its sizes: all that is needed to build weights, gates and states, and to run them."""

    heads: int
    key_dim: int  # K, width of q and k per head
    value_dim: int  # V, width of v and y per head
    architecture: Architecture = field(default_factory=Matrix)
    features: Features = field(default_factory=Identity)
    objective: Objective = field(default_factory=L2)
    window: Window = field(default_factory=Window)
    optimizer: Optimizer = field(default_factory=Descent)
    retention: Retention = field(default_factory=Keep)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        for axis, kinds in PARTS.items():
            part = getattr(self, axis)
            if type(part) not in kinds.values():
                raise ValueError(f"{axis} is {part!r}, wanted one of {', '.join(kinds)}")
        for breaks, reason in ILLEGAL:
            if breaks(self):
                got = ", ".join(str(getattr(self, axis)) for axis in PARTS)
                sizes = f"key_dim {self.key_dim}, value_dim {self.value_dim}"
                raise ValueError(f"this combination cannot be ({sizes}, {got}): {reason}")

    @property
    def feature_dim(self) -> int:
        """F, width of a key as the memory sees it."""
        return self.features.width(self.key_dim)

    @property
    def online(self) -> bool:
        """Slopes are taken at the newest memory; no anchor is kept."""
        return self.timing.chunk == 1

    @property
    def keeps_pairs(self) -> bool:
        return isinstance(self.architecture, KeptPairs)

    @property
    def network(self) -> MLP:
        """The architecture, where it is a network with weights and not a store of pairs."""
        assert not isinstance(self.architecture, KeptPairs)
        return self.architecture

    @property
    def gates(self) -> dict[str, Gate]:
        """The gates that the parts of this spec read, by name."""
        parts = (self.objective, self.window, self.optimizer, self.retention)
        return {gate.name: gate for part in parts for gate in part.gates()}

    @property
    def pair_gates(self) -> tuple[str, ...]:
        return tuple(name for name, gate in self.gates.items() if gate.of_pair)

    @property
    def fast_shapes(self) -> dict[str, tuple[int, int]]:
        """[O, I] of each fast weight of one head."""
        return self.architecture.shapes(self.feature_dim, self.value_dim)

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """Outer weights that are random constants: saved with a model, never trained."""
        return self.features.frozen()

    def init_weights(self, seed: int = 0) -> dict[str, Tensor]:
        """The outer weights in fp32: initial fast weights `memory.*` [H, O, I], and those of the parts."""
        generator = torch.Generator().manual_seed(seed)
        with torch.device("cpu"):  # the generator's, whatever default device a caller has set
            fast, outer = self.architecture.init(
                self.heads, self.feature_dim, self.value_dim, generator
            )
            maps = self.features.init(self.heads, self.key_dim, generator)
        return (
            {f"memory.{name}": weight for name, weight in fast.items()}
            | {f"architecture.{name}": weight for name, weight in outer.items()}
            | {f"features.{name}": weight for name, weight in maps.items()}
        )

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The outer weights by name, with their shapes."""
        return {name: tuple(weight.shape) for name, weight in self.init_weights().items()}

    def replace(self, **changes: Any) -> "MemorySpec":
        """A spec with some parts exchanged; chunk, period and after_retention reach into timing."""
        timing, rest = retime(changes.pop("timing", self.timing), changes)
        return dataclasses.replace(self, timing=timing, **rest)

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "heads": self.heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
        }
        for axis in PARTS:
            part = getattr(self, axis)
            record[axis] = {"kind": part.kind} | dataclasses.asdict(part)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "MemorySpec":
        """The inverse of `to_dict`. Unknown fields and parts are refused, none is guessed."""
        unknown = set(record) - {f.name for f in dataclasses.fields(cls)}
        missing = {f.name for f in dataclasses.fields(cls)} - set(record)
        if unknown or missing:
            raise ValueError(
                f"spec record has unknown fields {sorted(unknown)} and misses {sorted(missing)}; "
                "it was written by another version or is no memory spec"
            )
        parts = {axis: _part_from_dict(axis, record[axis]) for axis in PARTS}
        return cls(**{name: record[name] for name in ("heads", "key_dim", "value_dim")}, **parts)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "MemorySpec":
        return cls.from_dict(json.loads(text))

    @property
    def fingerprint(self) -> str:
        """A short hash of all that changes results."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def difference(self, other: "MemorySpec") -> str | None:
        """The first field in which two specs differ, with both values; None when they are equal."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"{name} is {mine.get(name)!r} and {theirs.get(name)!r}"
        return None


def retime(timing: Timing, changes: Mapping[str, Any]) -> tuple[Timing, dict[str, Any]]:
    """A timing with those of the changes that concern it, and the changes that do not.

    A period that spans the chunk follows it, unless it is changed itself.
    """
    names = {f.name for f in dataclasses.fields(Timing)}
    mine = {name: value for name, value in changes.items() if name in names}
    if "chunk" in mine and timing.period == timing.chunk > 1:
        mine = {"period": mine["chunk"]} | mine
    rest = {name: value for name, value in changes.items() if name not in names}
    return dataclasses.replace(timing, **mine), rest


def _kinds(*parts: type) -> dict[str, type]:
    return {part.kind: part for part in parts}  # type: ignore[attr-defined]


PARTS: dict[str, dict[str, type]] = {
    "architecture": _kinds(Matrix, MLP, GatedMLP, KeptPairs),
    "features": _kinds(
        Identity,
        Unit,
        Polynomial,
        Taylor,
        Elementwise,
        Sketch,
        Exponential,
    ),
    "objective": _kinds(L2, Dot, Huber),
    "window": _kinds(Window),
    "optimizer": _kinds(Descent, ImplicitDescent, Momentum, Muon),
    "retention": _kinds(Keep, Decay, DecayToStart, Renormalise),
    "timing": _kinds(Timing),
}


def _part_from_dict(axis: str, record: Mapping[str, Any]) -> Any:
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind not in PARTS[axis]:
        raise ValueError(f"{axis} is of kind {kind!r}, wanted one of {', '.join(PARTS[axis])}")
    part = PARTS[axis][kind]
    wanted = {f.name for f in dataclasses.fields(part)}
    if set(fields) != wanted:
        raise ValueError(f"{axis} {kind} has fields {sorted(fields)}, wanted {sorted(wanted)}")
    return part(**fields)


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _plain_matrix(spec: MemorySpec) -> bool:
    return isinstance(spec.architecture, Matrix) and not spec.architecture.norm


ILLEGAL: tuple[tuple[Callable[[MemorySpec], bool], str], ...] = (
    (
        lambda s: s.architecture.norm and s.feature_dim != s.value_dim,
        "a memory with an output norm adds its input to its output, so it needs as many features as "
        "values; change value_dim, drop the norm, or choose features of the values' width",
    ),
    (
        lambda s: s.keeps_pairs != isinstance(s.features, Exponential),
        "exponential features have no finite image and live in kept pairs alone, and kept pairs need "
        "a kernel; pair exponential with kept_pairs, or use taylor features in a matrix or MLP memory",
    ),
    (
        lambda s: s.keeps_pairs and type(s.optimizer) is not Descent,
        "kept pairs are changed by plain descent only: momentum and Newton-Schulz act on weight "
        "matrices, which kept pairs do not have; use taylor features in a matrix or MLP memory",
    ),
    (
        lambda s: s.keeps_pairs and not (type(s.retention) is Keep and s.online),
        "kept pairs are never forgotten and have no anchor; use retention keep and chunk 1",
    ),
    (
        lambda s: s.keeps_pairs and isinstance(s.objective, Huber),
        "the errors of kept pairs are solved as a linear system, which Huber's slope is not; use l2",
    ),
    (
        lambda s: (
            isinstance(s.features, Exponential)
            and s.features.normalise
            and not isinstance(s.objective, Dot)
        ),
        "a normalised read needs non-negative weights, which only the dot objective gives; use dot, "
        "or drop normalise",
    ),
    (
        lambda s: (
            isinstance(s.optimizer, ImplicitDescent)
            and not (
                _plain_matrix(s)
                and s.online
                and s.window.size == 1
                and s.window.gate == "fixed"
                and isinstance(s.objective, L2)
            )
        ),
        "the implicit step has a closed form for one pair, the l2 objective and a matrix memory read "
        "online; use descent elsewhere",
    ),
    (
        lambda s: s.timing.after_retention and not s.online,
        "a slope after retention is taken at alpha_t M_{t-1}, but a chunk takes its slopes at the "
        "anchor; use chunk 1, or after_retention False",
    ),
    (
        lambda s: s.timing.period > 1 and not isinstance(s.optimizer, Muon),
        "the period says how often Newton-Schulz moves the memory, and only muon has it; use period 1",
    ),
    (
        lambda s: s.timing.chunk % s.timing.period != 0,
        "a Newton-Schulz period must end on chunk borders; make chunk a multiple of period",
    ),
    (
        lambda s: isinstance(s.retention, Renormalise) and isinstance(s.architecture, Matrix),
        "renormalise returns each row to its initial length, and a matrix memory starts at zero; use a "
        "deep memory, or decay",
    ),
    (
        lambda s: (getattr(s.features, "project", None) or 0) > s.key_dim,
        "features project the key to more dimensions than it has; make project at most key_dim, or None",
    ),
    (
        lambda s: isinstance(s.optimizer, Momentum) and s.optimizer.truncate and s.online,
        "truncate cuts the gradient through the momentum at chunk borders, and the online rule has "
        "a border at every token; use a chunk, or truncate False",
    ),
)
