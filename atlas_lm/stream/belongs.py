"""Does this belong to that model? Asked before a memory is saved and before one is opened.

Every check raises ValueError with what was got, what was wanted and what to do.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from atlas_lm.models import AtlasForCausalLM, StreamState
from atlas_lm.models.config import GROWS, AtlasConfig
from atlas_lm.models.fingerprint import config_record, fingerprint
from atlas_lm.stream.header import Header, shorten, to_json

ODD = "no stream of this model leaves that behind; go back to an older copy"

Kind = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: dtype and shape


def kind(tensor: Tensor) -> Kind:
    return tensor.dtype, tuple(tensor.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_model(header: Header, model: AtlasForCausalLM) -> None:
    """Refuse a header of another model, naming the fields that differ with both values."""
    specs, layers = rules_of(model.config)
    fields = differences(header.config, config_record(model.config))
    fields = fields or differences(
        {"layers": header.layers, "specs": header.specs}, {"layers": layers, "specs": specs}
    )
    if fields:
        more = f" (and {len(fields) - 3} more)" if fields[3:] else ""
        raise ValueError(
            f"belongs to another model: {', '.join(fields[:3])}{more}; open it with the model that it was "
            "saved with"
        )
    dtype = dtype_name(model.dtype)
    if header.dtype != dtype:
        raise ValueError(
            f"was written by a model in {shorten(header.dtype)}, this one is in {dtype}; load the model with "
            "that dtype"
        )
    found = fingerprint(model)
    if header.model_fingerprint != found:
        raise ValueError(
            "belongs to a model of the same configuration with other weights: fingerprint "
            f"{shorten(header.model_fingerprint)} in the file and {found!r} here; open it with the weights "
            "that it was saved with"
        )


def differences(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    places: tuple[str, str] = ("in the file", "here"),
) -> list[str]:
    """Each field in which two records of one kind differ, with both values and where they stand."""
    theirs, ours = _flatten(theirs), _flatten(ours)
    fields = []
    for name in sorted(theirs.keys() | ours.keys()):
        got, wanted = theirs.get(name, "absent"), ours.get(name, "absent")
        if to_json(got) != to_json(wanted):  # exact: 1 is not True
            values = f"{shorten(got)} {places[0]} and {shorten(wanted)} {places[1]}"
            fields.append(f"{shorten(name)[1:-1]} is {values}")
    return fields


def rules_of(config: AtlasConfig) -> tuple[dict[str, dict[str, Any]], tuple[str | None, ...]]:
    """The rules of a model's memories by fingerprint, and of each layer the fingerprint of its rule."""
    specs = config.layer_specs
    records = {spec.fingerprint: spec.to_dict() for spec in specs if spec is not None}
    return records, tuple(None if spec is None else spec.fingerprint for spec in specs)


def check_place(tokens: int, stride: int, pending: int) -> int:
    """Where the state stands: at the last border of a stride before the last token."""
    position = max(tokens - 1, 0) // stride * stride
    if tokens < 0 or tokens - pending != position:
        raise ValueError(
            f"has {tokens} tokens in strides of {stride} with {pending} of them pending, wanted "
            f"{tokens - position}; {ODD}"
        )
    return position


def start_of(model: AtlasForCausalLM) -> StreamState:
    """The state before the first token: the skeleton that a file must fit."""
    with torch.no_grad():
        return model.initial_state(1)


def wanted_kinds(config: AtlasConfig, start: StreamState, position: int) -> dict[str, Kind]:
    """Of each leaf what it must be, `position` tokens from the start: what keeps every token has grown."""
    kinds = {name: kind(leaf) for name, leaf in start.leaves().items()}
    for name, axis in _growing(config):
        dtype, shape = kinds[name]
        kinds[name] = (dtype, (*shape[:axis], shape[axis] + position, *shape[axis + 1 :]))
    return kinds


def check_kinds(got: Mapping[str, Kind], wanted: Mapping[str, Kind]) -> None:
    missing, foreign = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    if missing or foreign:
        raise ValueError(
            f"lacks the tensors {shorten(missing)} and has {shorten(foreign)}, which this model does not "
            "know; it belongs to another model or version"
        )
    for name, one in wanted.items():
        if got[name] != one:
            raise ValueError(
                f"tensor {name} is {say(got[name])}, wanted {say(one)} at this place of the stream; it "
                "belongs to another model, or was cut from a batch with padding"
            )


def say(kind: Kind) -> str:
    return f"{dtype_name(kind[0])} {list(kind[1])}"


def check_positions(leaves: Mapping[str, Tensor], start: StreamState, position: int) -> None:
    """All clocks of the state show the same time."""
    for name, leaf in start.leaves().items():
        if name.endswith("position"):
            wanted, got = int(leaf[0]) + position, int(leaves[name][0])
            if got != wanted:
                raise ValueError(f"{name} is {got}, wanted {wanted} like the rest; {ODD}")


def check_pending(pending: Tensor, vocab_size: int) -> None:
    bad = pending[(pending < 0) | (pending >= vocab_size)]
    if len(bad):
        raise ValueError(
            f"a pending token has id {int(bad[0])}, wanted 0 to {vocab_size - 1}; {ODD}"
        )


def _growing(config: AtlasConfig) -> Iterator[tuple[str, int]]:
    """Leaves that grow with the stream, and along which axis."""
    for i, (block, spec) in enumerate(zip(config.blocks, config.layer_specs, strict=True)):
        if block in GROWS:
            yield from ((f"layers.{i}.tails.attention.{key}", 1) for key in ("k", "v"))
        elif spec is not None and spec.keeps_pairs:
            yield from ((f"layers.{i}.memory.memory.{key}", 2) for key in ("keys", "coefficients"))


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        inner = isinstance(value, Mapping) and value
        flat |= _flatten(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat
