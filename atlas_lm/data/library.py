"""Where data lies: in the folder that ATLAS_DATA names, and a small sample of everything in the package."""

import functools
import hashlib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUNDLED = HERE / "bundled"
COMPLETE = "complete"  # what the catalogue says of an item that the package has as a whole


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "atlas-lm"


def data_folder() -> Path:
    """Where large data is looked for: ATLAS_DATA, by default a folder of the user's cache."""
    named = os.environ.get("ATLAS_DATA")
    if named and not Path(named).is_dir():
        raise ValueError(
            f"ATLAS_DATA is {named!r}, which is no folder; make it, correct it, or leave it unset for the "
            "samples of the package"
        )
    return Path(named or cache_folder() / "data")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    path: str  # below the data folder
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """One entry of the catalogue."""

    name: str
    what: str
    licence: str
    source: str  # where it can be had
    bundled: str  # what of it the package has
    files: tuple[DataFile, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """An item's files, where they were found."""

    item: Item
    paths: tuple[Path, ...]
    sample: bool  # only the small sample of the package

    @property
    def description(self) -> str:
        """What it is, for the record of a run."""
        if self.sample:
            return f"sample in the package: {self.item.bundled}"
        missing = len(self.item.files) - len(self.paths)
        part = f" ({len(self.paths)} of {len(self.item.files)} files)" if missing else ""
        return f"{self.item.what}{part}"

    @property
    def fingerprint(self) -> str:
        """Of the contents of the files."""
        digests = [digest(path) for path in self.paths]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Library:
    """Finds items of the catalogue.

    Args:
        folder: where the large data lies; by default `data_folder()`.
        small: take the samples of the package even where the large data is there.
    """

    folder: Path | None = None
    small: bool = False

    def find(self, name: str) -> Found:
        """The files of an item: those in the data folder, else the sample of the package."""
        item = catalogue()[name]
        if not self.small:
            folder = self.folder or data_folder()
            there = tuple(folder / f.path for f in item.files if (folder / f.path).is_file())
            if there:
                return Found(item=item, paths=there, sample=False)
        paths = tuple(BUNDLED / f.path for f in item.files if (BUNDLED / f.path).is_file())
        return Found(item=item, paths=paths, sample=item.bundled != COMPLETE)


@functools.cache
def catalogue() -> dict[str, Item]:
    """Every item by its name."""
    with (HERE / "catalogue.toml").open("rb") as file:
        entries = tomllib.load(file)["item"]
    return {entry["name"]: _item(entry) for entry in entries}


def _item(entry: dict[str, Any]) -> Item:
    files = tuple(DataFile(**file) for file in entry.pop("file"))
    return Item(files=files, **entry)


@functools.cache
def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
