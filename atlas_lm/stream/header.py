"""The header of a memory file (docs/memory-files.md): read with suspicion, before anything else is read.

A memory file is a safetensors file: 8 bytes with the length of the header, the header as JSON, the bytes of
the tensors. No length, name or type in it is believed before it is checked.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT, VERSION = "atlas-memory", 1
LONGEST_HEADER = 4 * 2**20  # bytes; 24 layers need some 100 KiB
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DEEPEST = 16  # records within records
ANYTHING = r"(?s).*"  # JSON, looked at in detail
NUMBER = r"0|[1-9][0-9]{0,17}"
METADATA = {  # what each must look like; all of them are there, and no others
    "format": FORMAT,
    "format_version": str(VERSION),
    "atlas_lm_version": r"[0-9A-Za-z.+!-]{1,64}",
    "model_fingerprint": r"[0-9a-f]{16}",
    "config": ANYTHING,
    "specs": ANYTHING,
    "layers": ANYTHING,
    "tokens": NUMBER,
    "stride": NUMBER.removeprefix("0|"),
    "dtype": r"[a-z0-9]{1,16}",
    "quantization": ANYTHING,
    "checksum": r"[0-9a-f]{64}",
}
NAME = r"[A-Za-z0-9_.]{1,200}"  # of a tensor
DAMAGED = "the file is damaged: go back to a copy of it, or read the text again"


class MemoryFileError(ValueError):
    """A memory file is refused: which, what was got, what was wanted, what to do."""


@dataclass(frozen=True)
class Entry:
    """One tensor as it lies in the file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # its bytes, counted from the end of the header
    end: int


@dataclass(frozen=True)
class Quantized:
    """One tensor that was stored in few bits."""

    shape: tuple[int, ...]  # before packing
    error: float  # |stored - given| / |given|, Euclidean


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a memory file says about itself."""

    atlas_lm_version: str  # that wrote it
    model_fingerprint: str  # configuration and weights of the model that read
    config: dict[str, Any]  # `config_record` of that model
    specs: dict[str, dict[str, Any]]  # rules of memories by fingerprint
    layers: tuple[str | None, ...]  # fingerprint of each block's rule; None: it has no memory
    tokens: int  # read so far, pending ones too
    stride: int  # tokens per call of the model
    dtype: str  # of the model's weights
    bits: int | None  # of the fast weights, where they were quantised
    quantized: dict[str, Quantized]  # by tensor
    checksum: str = ""
    format_version: int = VERSION

    def to_metadata(self) -> dict[str, str]:
        """As the file holds it, strings by name; the inverse of `from_metadata`."""
        tensors = {n: {"shape": q.shape, "error": q.error} for n, q in self.quantized.items()}
        quantization = None if self.bits is None else {"bits": self.bits, "tensors": tensors}
        return {
            "format": FORMAT,
            "format_version": str(self.format_version),
            "atlas_lm_version": self.atlas_lm_version,
            "model_fingerprint": self.model_fingerprint,
            "config": to_json(self.config),
            "specs": to_json(self.specs),
            "layers": to_json(self.layers),
            "tokens": str(self.tokens),
            "stride": str(self.stride),
            "dtype": self.dtype,
            "quantization": to_json(quantization),
            "checksum": self.checksum,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "Header":
        _check_format(metadata)
        bits, quantized = _quantization(parse_json(metadata["quantization"], "quantization"))
        return cls(
            atlas_lm_version=metadata["atlas_lm_version"],
            model_fingerprint=metadata["model_fingerprint"],
            config=_record(parse_json(metadata["config"], "config"), "config"),
            specs=_specs(parse_json(metadata["specs"], "specs")),
            layers=_layers(parse_json(metadata["layers"], "layers")),
            tokens=int(metadata["tokens"]),
            stride=int(metadata["stride"]),
            dtype=metadata["dtype"],
            bits=bits,
            quantized=quantized,
            checksum=metadata["checksum"],
        )


@dataclass(frozen=True)
class Head:
    """The whole head of a file: the header and where each tensor lies."""

    header: Header
    metadata: dict[str, str]
    entries: dict[str, Entry]
    start: int  # of the tensors' bytes in the file
    size: int  # of the file


@contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turn all that can be wrong with a file into one exception that names it."""
    try:
        yield
    except MemoryFileError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise MemoryFileError(
            f"{path}: cannot be read ({reason}), wanted a memory file; check the path"
        ) from error
    except ValueError as error:
        raise MemoryFileError(f"{path}: {error}") from error


def read_header(path: str | Path) -> Header:
    """What a memory file says about itself, its checksum not yet verified. No model is needed."""
    with refusing(path), open(path, "rb") as file:
        return read_head(file).header


def read_head(file: BinaryIO) -> Head:
    """Read and check the head of an open file. Raises ValueError or OSError."""
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(
            f"has {size} bytes and a header of {length} bytes, so it is cut off or no memory file; {DAMAGED}"
        )
    if length > LONGEST_HEADER:
        raise ValueError(
            f"has a header of {length} bytes, wanted at most {LONGEST_HEADER}; this is no memory file"
        )
    record = _record(parse_json(_decode(file.read(length)), "header"), "header")
    metadata = _strings(record.pop("__metadata__", None))
    header = Header.from_metadata(metadata)
    entries = {name: _entry(name, value) for name, value in record.items()}
    _check_offsets(entries, size - 8 - length)
    return Head(header, metadata, entries, 8 + length, size)


def write_head(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """The head of a file, padded so that the tensors begin at a multiple of 8 bytes."""
    record: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.end]
        record[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(
            f"the header of this memory has {len(text)} bytes, wanted at most {LONGEST_HEADER}; the "
            "model has too many layers for this format"
        )
    return len(text).to_bytes(8, "little") + text


def checksum(
    metadata: Mapping[str, str],
    entries: Mapping[str, Entry],
    buffers: Iterable[bytes | memoryview],
) -> str:
    """SHA-256 over all metadata but itself, each tensor's name, dtype and shape, and their bytes.

    buffers: the bytes of each tensor, in the order of their sorted names.
    """
    tensors = {name: [entry.dtype, list(entry.shape)] for name, entry in entries.items()}
    covered = {name: text for name, text in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(to_json({"metadata": covered, "tensors": tensors}).encode())
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def to_json(value: Any) -> str:
    """One spelling for one value: names sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(text: str, what: str) -> Any:
    """JSON without what is ambiguous: no name twice, no NaN."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        _check_depth(value, DEEPEST)
    except ValueError as error:
        raise ValueError(f"its {what} is no proper JSON ({error}); {DAMAGED}") from error
    except RecursionError as error:
        raise ValueError(f"its {what} is nested too deeply; {DAMAGED}") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name stands twice in one record")
    return record


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, left - 1)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"has a header that is no text, so it is damaged or no memory file; {DAMAGED}"
        ) from error


def _record(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its {what} is {shorten(value)}, wanted a JSON object; {DAMAGED}")
    return value


def _strings(value: Any) -> dict[str, str]:
    if value is None:
        raise ValueError(
            f"has no metadata, wanted format {FORMAT}: a file with tensors of something else, not a memory"
        )
    for name, text in _record(value, "metadata").items():
        if not isinstance(text, str):
            raise ValueError(f"metadata {name} is {shorten(text)}, wanted a string; {DAMAGED}")
    return dict(value)


def _check_format(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"has format {shorten(metadata.get('format'))}, wanted {FORMAT}: a file with tensors of "
            "something else, not a memory"
        )
    if metadata.get("format_version") != str(VERSION):
        raise ValueError(
            f"has format version {shorten(metadata.get('format_version'))}, this version of atlas-lm reads "
            f"{VERSION}; update atlas-lm, or write the file again with this version"
        )
    unknown, missing = metadata.keys() - METADATA.keys(), METADATA.keys() - metadata.keys()
    if unknown or missing:
        raise ValueError(
            f"has metadata {shorten(sorted(unknown))} that version {VERSION} does not know and misses "
            f"{sorted(missing)}; {DAMAGED}"
        )
    for name, text in metadata.items():
        if not re.fullmatch(METADATA[name], text):
            raise ValueError(
                f"metadata {name} is {shorten(text)}, wanted {METADATA[name]}; {DAMAGED}"
            )


def _specs(value: Any) -> dict[str, dict[str, Any]]:
    return {name: _record(spec, f"spec {name}") for name, spec in _record(value, "specs").items()}


def _layers(value: Any) -> tuple[str | None, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str | None) for v in value):
        raise ValueError(
            f"metadata layers is {shorten(value)}, wanted a list of fingerprints; {DAMAGED}"
        )
    return tuple(value)


def _quantization(value: Any) -> tuple[int | None, dict[str, Quantized]]:
    if value is None:
        return None, {}
    value = _record(value, "quantization")
    bits = value.get("bits")
    if value.keys() != {"bits", "tensors"} or type(bits) is not int or bits not in (8, 4):
        raise ValueError(
            f"metadata quantization is {shorten(value)}, wanted bits 8 or 4 and tensors; {DAMAGED}"
        )
    tensors = _record(value["tensors"], "quantization")
    return bits, {name: _quantized(name, record) for name, record in tensors.items()}


def _quantized(name: str, value: Any) -> Quantized:
    record = _record(value, f"quantization of {name}")
    error = record.get("error")
    if record.keys() != {"shape", "error"} or type(error) not in (int, float):
        raise ValueError(
            f"quantization of {shorten(name)} is {shorten(record)}, wanted shape and error; {DAMAGED}"
        )
    return Quantized(_shape(name, record["shape"]), float(error))  # type: ignore[arg-type]


def _shape(name: str, value: Any) -> tuple[int, ...]:
    fine = isinstance(value, list) and len(value) <= 8
    if not fine or not all(type(n) is int and 0 <= n < 2**48 for n in value):
        raise ValueError(f"tensor {shorten(name)} has shape {shorten(value)}; {DAMAGED}")
    return tuple(value)


def _entry(name: str, value: Any) -> Entry:
    record = _record(value, f"tensor {shorten(name)}")
    dtype = record.get("dtype")
    if not re.fullmatch(NAME, name):
        raise ValueError(f"has a tensor {shorten(name)}, wanted names like {NAME}; {DAMAGED}")
    if record.keys() != {"dtype", "shape", "data_offsets"} or not isinstance(dtype, str):
        raise ValueError(
            f"tensor {shorten(name)} is described by {shorten(record)}, wanted dtype, shape and "
            f"data_offsets; {DAMAGED}"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"tensor {shorten(name)} has dtype {shorten(dtype)}, wanted one of {', '.join(DTYPES)}; {DAMAGED}"
        )
    shape = _shape(name, record["shape"])
    offsets: Any = record["data_offsets"]
    bytes_wanted = math.prod(shape) * DTYPES[dtype].itemsize
    fine = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)
    if not fine or offsets[1] - offsets[0] != bytes_wanted:
        raise ValueError(
            f"tensor {shorten(name)} lies at {shorten(offsets)}, wanted {bytes_wanted} bytes; {DAMAGED}"
        )
    return Entry(dtype, shape, *offsets)


def _check_offsets(entries: Mapping[str, Entry], size: int) -> None:
    """The tensors fill the rest of the file, without gap or overlap."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(
                f"tensor {shorten(name)} begins at byte {entry.begin}, wanted {end}; {DAMAGED}"
            )
        end = entry.end
    if end != size:
        raise ValueError(
            f"has {size} bytes of tensors, its header names {end}: it was cut off or something was appended; "
            f"{DAMAGED}"
        )


def shorten(value: Any, limit: int = 80) -> str:
    """A value from a file as it may stand in a message: printable, on one line, not too long."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
