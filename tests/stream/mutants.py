"""Memory files with something wrong in them: by accident, or made so on purpose with a fitting checksum."""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from random import Random
from typing import Any

Mutant = tuple[str, bytes]  # what was done, and the file
Record = dict[str, Any]


def split(raw: bytes) -> tuple[Record, bytes]:
    """The header of a file and the bytes of its tensors."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def join(record: Record | str, data: bytes) -> bytes:
    text = (record if isinstance(record, str) else json.dumps(record)).encode()
    return len(text).to_bytes(8, "little") + text + data


def sign(record: Record, data: bytes) -> Record:
    """The header with the checksum that a careful forger would give it."""
    covered = {n: v for n, v in record["__metadata__"].items() if n != "checksum"}
    tensors = {n: [v["dtype"], v["shape"]] for n, v in record.items() if n != "__metadata__"}
    text = {"metadata": covered, "tensors": tensors}
    digest = sha256(json.dumps(text, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        digest.update(data[slice(*record[name]["data_offsets"])])
    return record | {"__metadata__": covered | {"checksum": digest.hexdigest()}}


def flip_bit(raw: bytes, random: Random) -> bytes:
    place = random.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1 :]


def flip_bit_of_header(raw: bytes, random: Random) -> bytes:
    end = 8 + int.from_bytes(raw[:8], "little")
    return flip_bit(raw[:end], random) + raw[end:]


def change_bytes(raw: bytes, random: Random) -> bytes:
    place, length = random.randrange(len(raw)), random.randint(1, 64)
    return (raw[:place] + random.randbytes(length) + raw[place + length :])[: len(raw)]


def truncate(raw: bytes, random: Random) -> bytes:
    return raw[: random.choice([random.randrange(len(raw)), random.randrange(16), len(raw) - 1])]


def append(raw: bytes, random: Random) -> bytes:
    return raw + random.randbytes(random.randint(1, 64))


def wrong_length(raw: bytes, random: Random) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    lies = [
        0,
        1,
        length - 8,
        length + 8,
        len(raw),
        2**31,
        2**63,
        2**64 - 1,
        random.randrange(2**64),
    ]
    return random.choice(lies).to_bytes(8, "little") + raw[8:]


def foreign_header(raw: bytes, random: Random) -> bytes:
    _, data = split(raw)
    whole = {"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    headers = [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        '{"a":' * 5_000,
        json.dumps(whole),
        json.dumps(whole | {"__metadata__": {"format": "pt"}}),
        json.dumps(whole | {"__metadata__": {"format": "atlas-memory"}}),
        json.dumps(whole | {"__metadata__": {"format": "atlas-memory", "format_version": "2"}}),
        json.dumps({"__metadata__": ["format"]}),
        random.randbytes(200).decode("latin-1"),
    ]
    return join(random.choice(headers), data)


def swap_tensors(raw: bytes, random: Random) -> bytes:
    """Exchange the places of two tensors of one kind, or their names."""
    record, data = split(raw)
    names = [n for n in record if n != "__metadata__" and record[n]["shape"][-1] > 0]
    same = [(a, b) for a in names for b in names if a < b and _kind(record[a]) == _kind(record[b])]
    a, b = random.choice(same)
    record[a], record[b] = record[b], record[a]
    return join(record, data)


def edit_metadata(raw: bytes, random: Random) -> bytes:
    record, data = split(raw)
    metadata = record["__metadata__"]
    name = random.choice(list(metadata))
    edits: list[Callable[[], Any]] = [
        lambda: metadata.pop(name),
        lambda: metadata.update({name: random.choice([None, 7, 1.5, [], {}, True])}),
        lambda: metadata.update({name: ""}),
        lambda: metadata.update({name: metadata[name] + "0"}),
        lambda: metadata.update({name: metadata[name][::-1] + "\x1b"}),
        lambda: metadata.update({name + "x": metadata[name]}),
        lambda: metadata.update({name: "[" * 3_000}),
        lambda: metadata.update({name: "9" * 5_000}),
    ]
    random.choice(edits)()
    return join(record, data)


def name_twice(raw: bytes, random: Random) -> bytes:
    record, data = split(raw)
    name = random.choice(list(record))
    text = json.dumps(record)
    return join(f"{text[:-1]}, {json.dumps(name)}: {json.dumps(record[name])}}}", data)


def edit_entry(raw: bytes, random: Random) -> bytes:
    """Lie about a tensor; half of the lies come with a fitting checksum."""
    record, data = split(raw)
    name = random.choice([n for n in record if n != "__metadata__"])
    entry = record[name]
    begin, end = entry["data_offsets"]
    lies: list[Record | list[int] | None] = [
        None,
        [],
        entry | {"dtype": random.choice(["F16", "F64", "I8", "Q4", 3, None])},
        entry | {"shape": [*entry["shape"], 2]},
        entry | {"shape": [2**40] * 8},
        entry | {"shape": [-1, *entry["shape"]]},
        entry | {"shape": [10**30]},
        entry | {"shape": [True], "dtype": "U8"},
        entry | {"shape": "long"},
        entry | {"data_offsets": [begin, end + 8]},
        entry | {"data_offsets": [begin - 8, end - 8]},
        entry | {"data_offsets": [10**15, 10**15 + end - begin]},
        entry | {"data_offsets": [begin]},
        entry | {"shape": [2**40], "data_offsets": [begin, begin + 2**42]},
        entry | {"more": 1},
    ]
    record[name] = random.choice(lies)
    if isinstance(record[name], dict) and random.random() < 0.5:
        with_shapes = isinstance(record[name].get("shape"), list)
        offsets = record[name]["data_offsets"]
        if with_shapes and len(offsets) == 2:
            record = sign(record, data)
    return join(record, data)


FORGERIES: dict[str, list[str]] = {  # values that no honest file of this model has
    "tokens": ["0", "1", "999999999999999999", "-3", "1e3", "٣"],
    "stride": ["0", "-1", "7", "1000003", "16.0"],
    "dtype": ["float16", "bfloat16", "float64", "int8", ""],
    "model_fingerprint": ["0" * 16, "", "0" * 15],
    "config": ["{}", "[]", "null", '{"blocks": []}', '{"a": NaN}', '{"a": 1, "a": 2}'],
    "specs": ["{}", "[]", '{"x": {}}', '{"x": []}'],
    "layers": ["[]", "{}", "[null]", '["a", "b"]', "[1, 2]"],
    "quantization": ["{}", "[]", '{"bits": 8, "tensors": {}}', '{"bits": 2, "tensors": {}}'],
    "format_version": ["0", "2", "one", "1.0"],
    "format": ["atlas", ""],
}


def forge(raw: bytes, random: Random) -> bytes:
    """Change what the file says of itself, or a number inside, and sign it anew."""
    record, data = split(raw)
    if random.random() < 0.7:
        name = random.choice(list(FORGERIES))
        metadata = record["__metadata__"] | {name: random.choice(FORGERIES[name])}
        return join(sign(record | {"__metadata__": metadata}, data), data)
    clocks = [n for n in record if n.endswith("position") or n == "pending"]
    begin = record[random.choice(clocks)]["data_offsets"][0]
    number = random.choice([-1, -(2**63), 2**63 - 1, 10**6]).to_bytes(8, "little", signed=True)
    data = data[:begin] + number + data[begin + 8 :]
    return join(sign(record, data), data)


def drop_tensor(raw: bytes, random: Random) -> bytes:
    """Leave out the last tensor, or add one, and sign the rest properly."""
    record, data = split(raw)
    last = max((n for n in record if n != "__metadata__"), key=lambda n: record[n]["data_offsets"])
    if random.random() < 0.5:
        data = data[: record.pop(last)["data_offsets"][0]]
    else:
        entry = {"dtype": "U8", "shape": [8], "data_offsets": [len(data), len(data) + 8]}
        record["layers.0.memory.extra"], data = entry, data + random.randbytes(8)
    return join(sign(record, data), data)


MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    flip_bit,
    flip_bit_of_header,
    change_bytes,
    truncate,
    append,
    wrong_length,
    foreign_header,
    swap_tensors,
    edit_metadata,
    name_twice,
    edit_entry,
    forge,
    drop_tensor,
)


def mutants(files: list[bytes], count: int, seed: int) -> Iterator[Mutant]:
    """`count` damaged files, every kind of damage equally often, of all the given files."""
    random = Random(seed)
    for i in range(count):
        mutate = MUTATIONS[i % len(MUTATIONS)]
        yield f"{i}: {mutate.__name__}", mutate(random.choice(files), random)


def _kind(entry: Record) -> tuple[Any, ...]:
    return entry["dtype"], tuple(entry["shape"])
