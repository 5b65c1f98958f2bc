"""What a run has done so far, on disk: a header that says what it is, and a line for each finished sample.

A run that was killed goes on where it was: finished samples are kept, and a torn last line is dropped.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atlas_lm.evaluate.task import Record
from atlas_lm.stream.atomic import write_atomically

HEADER, RECORDS = "run.json", "records.jsonl"


class Journal:
    """The folder of a run.

    Args:
        what: all that determines the results. A folder that holds another run is refused.
        beside: what is worth knowing besides, of each time that the run was begun or gone on with.
    """

    def __init__(self, folder: Path, what: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        header = folder / HEADER
        known = json.loads(header.read_text()) if header.exists() else {"what": None, "times": []}
        wanted = json.loads(json.dumps(what))
        if known["what"] not in (None, wanted):
            raise ValueError(_complaint(folder, known["what"], wanted))
        record = {"what": wanted, "times": [*known["times"], dict(beside)]}
        write_atomically(header, [json.dumps(record, indent=1).encode()])
        self.records = {record["id"]: record for record in _whole_lines(folder / RECORDS)}

    def add(self, records: Iterable[Record]) -> None:
        """Write finished samples, as a whole, before anything else is done."""
        new = [record for record in records if record["id"] not in self.records]
        if not new:
            return
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in new)
        with (self.folder / RECORDS).open("ab") as file:
            file.write(lines.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        self.records |= {record["id"]: record for record in new}


def _whole_lines(path: Path) -> list[Record]:
    """The records of a file; what a killed run left of its last line is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _complaint(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in {**known, **wanted} if known.get(name) != wanted.get(name)]
    told = "; ".join(f"{n} was {known.get(n)!r} and is {wanted.get(n)!r}" for n in sorted(names))
    return f"{folder} holds the results of another run: {told}; choose another --out, or remove it"
