"""What a run has done so far, on disk: a header that says what it is, and a line for each finished sample.

A run that was killed goes on where it was: finished samples are kept, and a torn last line is dropped.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from atlas_lm.stream.atomic import write_atomically

HEADER, RECORDS = "run.json", "records.jsonl"
Record = dict[str, Any]


class Journal:
    """The folder of a run.

    Args:
        what: all that determines the results. A folder that holds another run is refused.
        beside: what is worth knowing besides, of each time that the run was begun or gone on with.
    """

    def __init__(self, folder: Path, what: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _alone(folder / RECORDS)
        weakref.finalize(self, self._file.close)
        header = folder / HEADER
        known = _read_header(header)
        wanted = json.loads(json.dumps(what))
        if known["what"] not in (None, wanted):
            raise ValueError(_complaint(folder, known["what"], wanted))
        record = {"what": wanted, "times": [*known["times"], dict(beside)]}
        write_atomically(header, [json.dumps(record, indent=1).encode()])
        self.records = {record["id"]: record for record in self._whole_lines()}

    def add(self, records: Iterable[Record]) -> None:
        """Write finished samples, as a whole, before anything else is done."""
        new = [record for record in records if record["id"] not in self.records]
        if not new:
            return
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in new)
        self._file.write(lines.encode("utf-8"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records |= {record["id"]: record for record in new}

    def cut(self, keep: Callable[[Record], bool]) -> None:
        """Drop the first record that is not to be kept, and all behind it."""
        self._file.seek(0)
        for line in self._file:
            if not keep(json.loads(line)):
                self._file.truncate(self._file.tell() - len(line))
                break
        self.records = {record["id"]: record for record in self._whole_lines()}

    def _whole_lines(self) -> list[Record]:
        """The records of the file; what a killed run left of its last line is cut off."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        lines = enumerate(whole.splitlines(), 1)
        return [_record(line, number, self.folder) for number, line in lines]


def _record(line: bytes, number: int, folder: Path) -> Record:
    try:
        record: Record = json.loads(line)
        return record
    except ValueError as error:
        raise ValueError(
            f"line {number} of {folder / RECORDS} is no record ({error}); remove it, and it is done again"
        ) from error


def _alone(path: Path) -> BinaryIO:
    """The file, held until it is closed or the process ends: two runs must not write into one folder."""
    file = path.open("a+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(
            f"another process is at work in {path.parent}; wait for it, or choose another --out"
        ) from error
    return file


def _read_header(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"what": None, "times": []}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {"what": known["what"], "times": list(known["times"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not the header of a run ({error!r}); choose another --out, or remove it"
        ) from error


def _complaint(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    told = "; ".join(_differences("", known, wanted))
    return f"{folder} holds the results of another run: {told}; choose another --out, or remove it"


def _differences(name: str, known: Any, wanted: Any) -> Iterator[str]:
    """Where two records differ, entry by entry."""
    if known == wanted:
        return
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in sorted({**known, **wanted}):
            yield from _differences(f"{name} {key}".lstrip(), known.get(key), wanted.get(key))
    else:
        yield f"{name} was {known!r} and is {wanted!r}"
