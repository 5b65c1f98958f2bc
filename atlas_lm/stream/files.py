"""Memories as files: saved in one step, opened only when every byte is accounted for.

The format is written down in docs/memory-files.md.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from atlas_lm import __version__
from atlas_lm.models import AtlasForCausalLM, StreamState
from atlas_lm.models.fingerprint import config_record, fingerprint
from atlas_lm.stream.atomic import write_atomically
from atlas_lm.stream.belongs import (
    Kind,
    check_kinds,
    check_model,
    check_pending,
    check_place,
    check_positions,
    dtype_name,
    kind,
    rules_of,
    say,
    start_of,
    wanted_kinds,
)
from atlas_lm.stream.header import (
    DAMAGED,
    DTYPES,
    Entry,
    Head,
    Header,
    Quantized,
    checksum,
    read_head,
    refusing,
    shorten,
    write_head,
)
from atlas_lm.stream.quantize import (
    Packed,
    fast_weights,
    pack,
    relative_error,
    to_quantize,
    unpack,
)
from atlas_lm.stream.reading import Reading

PENDING = "pending"  # the tensor beside the leaves of the state
SCALE = ".scale"  # the scales of a quantised tensor lie under its name with this behind
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class MemoryFile:
    """A memory file that was read without its model: verified against its checksum, no further."""

    header: Header
    leaves: dict[str, Tensor]  # of the state, on the CPU, quantised ones in fp32 again
    pending: Tensor
    size: int  # bytes on disk


def save_memory(
    path: str | Path, model: AtlasForCausalLM, reading: Reading, bits: int | None = None
) -> None:
    """Write where a stream stands to a file that `open_memory` continues from, the same to the last bit.

    The file is replaced in one step: a crash leaves the old one or the new one. The same reading gives the
    same bytes every time.

    Args:
        bits: 8 or 4 to store the fast weights quantised (`atlas_lm.stream.quantize`), None for all bits.

    Raises:
        ValueError: this reading does not belong to this model, or cannot be quantised.
        OSError: the file could not be written; an older one is still there.
    """
    leaves = {name: _plain(leaf) for name, leaf in reading.state.leaves().items()}
    pending = _plain(reading.pending)
    try:
        _check_reading(model, reading.stride, leaves, pending)
    except ValueError as error:
        raise ValueError(f"this reading cannot be saved with this model: {error}") from error
    tensors, quantized = leaves, dict[str, Quantized]()
    if bits is not None:
        tensors, quantized = _pack(leaves, to_quantize(reading.state), bits)
    tensors[PENDING] = pending
    header = _describe(model, reading, bits, quantized)
    entries = _lay_out(tensors)
    found = checksum(header.to_metadata(), entries, _buffers(tensors, sorted(tensors)))
    _write(path, replace(header, checksum=found).to_metadata(), tensors)


def open_memory(path: str | Path, model: AtlasForCausalLM) -> Reading:
    """Where the stream in a file stands, on the model's device.

    Raises MemoryFileError unless the file is whole, unchanged since it was saved, and of this very model.
    """
    with refusing(path), open(path, "rb") as file:
        head = read_head(file)
        check_model(head.header, model)
        start, position = start_of(model), _position(head)
        wanted = wanted_kinds(model.config, start, position)
        _check_entries(head, wanted, fast_weights(start))
        leaves = _unpack(head.header, _read_tensors(file, head))
        pending = leaves.pop(PENDING)
        leaves = {name: leaves[name].to(dtype) for name, (dtype, _) in wanted.items()}
        check_positions(leaves, start, position)
        check_pending(pending, model.config.vocab_size)
        state = StreamState.from_leaves(model.config.layer_specs, leaves).to(model.device)
        return Reading(state=state, pending=pending, stride=head.header.stride)


def read_memory(path: str | Path) -> MemoryFile:
    """A file for looking at, whatever model it is of; only `open_memory` gives what can be continued."""
    with refusing(path), open(path, "rb") as file:
        head = read_head(file)
        _position(head)
        leaves = _unpack(head.header, _read_tensors(file, head))
        return MemoryFile(head.header, leaves, leaves.pop(PENDING), head.size)


def copy_memory(source: str | Path, target: str | Path, *, overwrite: bool = False) -> None:
    """Fork a stream: a copy of its file, made in one step, of exactly the bytes that were verified."""
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(
            f"{target} exists already and would be lost; choose another name, or allow overwriting"
        )
    with refusing(source), open(source, "rb") as file:
        head = read_head(file)
        tensors = _read_tensors(file, head)
    _write(target, head.metadata, tensors)


def _check_reading(
    model: AtlasForCausalLM, stride: int, leaves: Mapping[str, Tensor], pending: Tensor
) -> None:
    position = leaves["position"]
    if position.shape != (1,):
        raise ValueError(f"has {len(position)} streams, wanted one; take one with state.rows")
    if kind(pending) != (torch.int64, (len(pending),)):
        raise ValueError(f"pending is {say(kind(pending))}, wanted int64 [n]")
    check_place(int(position[0]) + len(pending), stride, len(pending))
    start = start_of(model)
    wanted = wanted_kinds(model.config, start, int(position[0]))
    check_kinds({name: kind(leaf) for name, leaf in leaves.items()}, wanted)
    check_positions(leaves, start, int(position[0]))
    check_pending(pending, model.config.vocab_size)


def _describe(
    model: AtlasForCausalLM, reading: Reading, bits: int | None, quantized: dict[str, Quantized]
) -> Header:
    specs, layers = rules_of(model.config)
    return Header(
        atlas_lm_version=__version__,
        model_fingerprint=fingerprint(model),
        config=config_record(model.config),
        specs=specs,
        layers=layers,
        tokens=reading.tokens,
        stride=reading.stride,
        dtype=dtype_name(model.dtype),
        bits=bits,
        quantized=quantized,
    )


def _write(path: str | Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    entries = _lay_out(tensors)
    write_atomically(path, [write_head(metadata, entries), *_buffers(tensors, entries)])


def _lay_out(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Where each tensor lies: the widest entries first, so that all are aligned, then by name."""
    entries, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), begin, end)
    return entries


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a plain tensor, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _buffers(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[memoryview]:
    return [_raw(tensors[name]) for name in names]


def _read_tensors(file: BinaryIO, head: Head) -> dict[str, Tensor]:
    """All tensors, in memory of their own, once the checksum is right."""
    tensors = {}
    for name in sorted(head.entries):
        entry = head.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        file.seek(head.start + entry.begin)
        if file.readinto(_raw(tensor)) != tensor.nbytes:  # type: ignore[attr-defined]
            raise ValueError("became shorter while it was read; read it again when it is at rest")
        tensors[name] = tensor
    found = checksum(head.metadata, head.entries, _buffers(tensors, sorted(tensors)))
    if found != head.header.checksum:
        raise ValueError(
            f"has checksum {shorten(head.header.checksum)}, its content gives {found!r}: it was changed "
            f"after it was saved; {DAMAGED}"
        )
    return tensors


def _position(head: Head) -> int:
    """Tokens that the state has read, by the header alone."""
    entry = head.entries.get(PENDING)
    if entry is None or entry.dtype != "I64" or len(entry.shape) != 1:
        raise ValueError(f"tensor {PENDING} is {shorten(entry)}, wanted I64 [n]; {DAMAGED}")
    return check_place(head.header.tokens, head.header.stride, entry.shape[0])


def _check_entries(head: Head, wanted: Mapping[str, Kind], fast: list[str]) -> None:
    """The file has a tensor for each leaf, of the wanted kind, and no others."""
    small = fast if head.header.bits else []
    kinds = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in head.entries.items()}
    del kinds[PENDING]
    check_kinds(kinds, _stored(wanted, small, head.header.bits))
    shapes = {name: one.shape for name, one in head.header.quantized.items()}
    if shapes != {name: wanted[name][1] for name in small}:
        raise ValueError(f"its quantised tensors are not this model's fast weights; {DAMAGED}")


def _pack(
    leaves: Mapping[str, Tensor], names: list[str], bits: int
) -> tuple[dict[str, Tensor], dict[str, Quantized]]:
    """The tensors that a file holds for these leaves, the named ones in few bits."""
    tensors, quantized = dict(leaves), {}
    for name in names:
        given = leaves[name]
        packed = pack(given, bits)
        tensors |= {name: packed.values, name + SCALE: packed.scale}
        error = relative_error(given, unpack(packed, bits, given.shape[-1]))
        quantized[name] = Quantized(tuple(given.shape), error)
    return tensors, quantized


def _unpack(header: Header, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves again, and `pending`; the inverse of `_pack`."""
    leaves, bits = dict(tensors), header.bits
    if bits is None:
        return leaves
    kinds = {name: (torch.float32, one.shape) for name, one in header.quantized.items()}
    for name, wanted in _stored(kinds, list(kinds), bits).items():
        if name not in tensors or kind(tensors[name]) != wanted:
            raise ValueError(f"quantised tensor {shorten(name)} is not {say(wanted)}; {DAMAGED}")
    for name, one in header.quantized.items():
        packed = Packed(leaves[name], leaves.pop(name + SCALE))
        leaves[name] = unpack(packed, bits, one.shape[-1])
    return leaves


def _stored(kinds: Mapping[str, Kind], names: list[str], bits: int | None) -> dict[str, Kind]:
    """What a file holds for leaves of these kinds, the named ones in so many bits."""
    stored = dict(kinds)
    for name in names:
        shape = kinds[name][1]
        stored[name + SCALE] = (torch.float32, shape[:-1])
        halved = (*shape[:-1], -(-shape[-1] // 2))
        stored[name] = (torch.int8, shape) if bits == 8 else (torch.uint8, halved)
    return stored
