"""What the doctor examines: a rule of ours, or any layer [B, T, D] -> [B, T, D] of anybody's."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atlas_lm.memory import MemorySpec, initial_state, memorize, presets
from atlas_lm.memory.features import Polynomial, Taylor
from atlas_lm.memory.memorize import Form
from atlas_lm.memory.state import MemoryState

Inputs = dict[str, Tensor]  # by name, each [B, T, ...]
MASKS, STATES = ("valid", "mask"), ("state",)


class Subject(Protocol):
    """A causal map over tokens. Streams start at state None; `valid` marks the tokens that count."""

    name: str
    dtype: torch.dtype
    length: int  # tokens of an examination

    @property
    def has_state(self) -> bool: ...

    @property
    def has_mask(self) -> bool: ...

    @property
    def has_packing(self) -> bool: ...

    def inputs(self, batch: int, tokens: int, seed: int) -> Inputs: ...

    def weights(self) -> dict[str, Tensor]:
        """Everything that training should reach, leaves with requires_grad."""
        ...

    def run(
        self,
        x: Inputs,
        state: Any = None,
        valid: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """y [B, T, ...] and the next state (None for subjects without one)."""
        ...

    def training(self, mode: bool) -> contextlib.AbstractContextManager[None]: ...


@dataclass
class RuleSubject:
    """A memory spec, run through `memorize` in fp64."""

    name: str
    spec: MemorySpec
    form: Form = "auto"
    dtype: torch.dtype = torch.float64
    length: int = 27
    has_state: bool = True
    has_mask: bool = True
    has_packing: bool = True
    outer: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for name, weight in self.spec.init_weights().items():
            noise = torch.randn(weight.shape, generator=generator, dtype=self.dtype)
            frozen = name in self.spec.frozen_weights
            value = weight.to(self.dtype) + (0.0 if frozen else 0.1) * noise
            self.outer[name] = value.requires_grad_(not frozen)

    def inputs(self, batch: int, tokens: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        spec = self.spec

        def draw(*shape: int) -> Tensor:
            return torch.randn(batch, tokens, *shape, generator=generator, dtype=self.dtype)

        x = {"q": draw(spec.heads, spec.key_dim), "k": draw(spec.heads, spec.key_dim)}
        x["v"] = draw(spec.heads, spec.value_dim)
        return x | draw_gates(spec, batch, tokens, generator, self.dtype)

    def weights(self) -> dict[str, Tensor]:
        return {name: w for name, w in self.outer.items() if w.requires_grad}

    def initial(self, batch: int) -> MemoryState:
        return initial_state(self.spec, self.outer, batch, dtype=self.dtype)

    def run(
        self,
        x: Inputs,
        state: Any = None,
        valid: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        form: Form | None = None,
    ) -> tuple[Tensor, Any]:
        gates = {name: x[name] for name in self.spec.gates}
        return memorize(
            self.spec,
            self.outer,
            state,
            x["q"],
            x["k"],
            x["v"],
            gates,
            valid=valid,
            cu_seqlens=cu_seqlens,
            form=form or self.form,
        )

    def training(self, mode: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


GATE_RANGES = {  # legal values well inside the range of each gate
    "eta": (0.05, 0.35),
    "log_alpha": (-0.2, 0.0),
    "theta": (0.2, 0.8),
    "gamma": (0.1, 0.6),
    "delta": (0.3, 1.3),
}


def draw_gates(
    spec: MemorySpec, batch: int, tokens: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random gates of a spec, by name."""
    gates = {}
    for name, gate in spec.gates.items():
        low, high = GATE_RANGES[name]
        draws = torch.rand(gate.shape(batch, tokens, spec.heads), generator=generator, dtype=dtype)
        gates[name] = low + (high - low) * draws
    if "gamma" in gates:  # a long window at these steps would diverge
        gates["gamma"] = gates["gamma"] * min(1.0, 5 / spec.window.size)
    return gates


def small_spec(name: str, **changes: Any) -> MemorySpec:
    """A preset in examination sizes: small chunks and windows, so that a short stream crosses many."""
    full = presets.build(name, heads=2, key_dim=16, value_dim=16)
    small: dict[str, Any] = {"heads": 2, "key_dim": 4, "value_dim": 4}
    if full.window.size > 1:
        small["window"] = type(full.window)(size=5, gate=full.window.gate)
    if isinstance(full.features, Polynomial | Taylor):
        small["features"] = type(full.features)(degree=full.features.degree, project=3)
    if full.timing.chunk > 1:
        small["chunk"] = 6
    if 1 < full.timing.period < full.timing.chunk:
        small["period"] = 3
    return presets.build(name, **(small | changes))


def preset_subject(name: str) -> RuleSubject:
    return RuleSubject(name=name, spec=small_spec(name))


@dataclass
class LayerSubject:
    """Any callable x [B, T, D] -> y [B, T, D], or -> (y, state).

    It has a state if it takes `state`, and a mask if it takes `valid` or `mask` (bool [B, T], True for
    tokens that count). An nn.Module is examined in the given dtype, its parameters as outer weights.
    """

    name: str
    layer: Callable[..., Any]
    width: int = 32
    dtype: torch.dtype = torch.float64
    length: int = 80
    has_packing: bool = False

    def __post_init__(self) -> None:
        if not callable(self.layer):
            raise ValueError(
                f"{self.name} made {type(self.layer).__name__}, wanted a callable layer"
            )
        if isinstance(self.layer, nn.Module):
            self.layer = self.layer.to(self.dtype)
        target = self.layer.forward if isinstance(self.layer, nn.Module) else self.layer
        taken = set(inspect.signature(target).parameters)
        self._state = next((word for word in STATES if word in taken), None)
        self._mask = next((word for word in MASKS if word in taken), None)

    @property
    def has_state(self) -> bool:
        return self._state is not None

    @property
    def has_mask(self) -> bool:
        return self._mask is not None

    def inputs(self, batch: int, tokens: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(batch, tokens, self.width, generator=generator, dtype=self.dtype)}

    def weights(self) -> dict[str, Tensor]:
        if not isinstance(self.layer, nn.Module):
            return {}
        return {name: p for name, p in self.layer.named_parameters() if p.requires_grad}

    def run(
        self,
        x: Inputs,
        state: Any = None,
        valid: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        assert cu_seqlens is None  # has_packing is False
        options: dict[str, Any] = {}
        if self._state and state is not None:
            options[self._state] = state
        if self._mask and valid is not None:
            options[self._mask] = valid
        out = self.layer(x["x"], **options)
        y, after = (out[0], out[1]) if isinstance(out, tuple) and len(out) > 1 else (out, None)
        y = y[0] if isinstance(y, tuple) else y
        if not isinstance(y, Tensor) or y.shape[:2] != x["x"].shape[:2]:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"{self.name} returned {got} for an input {list(x['x'].shape)}, wanted a tensor "
                "[B, T, ...] or (tensor, state); wrap the layer in a small function"
            )
        return y, after if self._state else None

    def training(self, mode: bool) -> contextlib.AbstractContextManager[None]:
        if not isinstance(self.layer, nn.Module):
            return contextlib.nullcontext()
        return training_mode(self.layer, mode)


@contextlib.contextmanager
def training_mode(module: nn.Module, mode: bool) -> Iterator[None]:
    """The module in train or eval mode for a while."""
    before = module.training
    module.train(mode)
    try:
        yield
    finally:
        module.train(before)


def load_layer(path: str, **options: Any) -> LayerSubject:
    """`package.module:factory`: import the module, call the factory, examine what it returns."""
    module_name, _, factory_name = path.partition(":")
    if not module_name or not factory_name:
        raise ValueError(f"layer is {path!r}, wanted package.module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot load {path}: {error}; is the module on the path (PYTHONPATH) and the name right?"
        ) from error
    return LayerSubject(name=factory_name, layer=factory(), **options)


def cut_inputs(x: Mapping[str, Tensor], start: int, stop: int) -> Inputs:
    return {name: tensor[:, start:stop] for name, tensor in x.items()}
