"""Folders that are made as a whole: whoever finds one finds all of it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex


def make_folder(path: Path, make: Callable[[Path], None]) -> None:
    """Make a folder, or nothing: what is made lies beside it under another name until it is done.

    Args:
        path: new or empty.
        make: fills the folder that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.parent / f".{path.name}.{token_hex(4)}"
    made.mkdir()
    try:
        make(made)
        os.replace(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def keep_folder(path: Path, make: Callable[[Path], None]) -> None:
    """Make a folder that others may make at the same time, from the same: the first that is done counts."""
    try:
        make_folder(path, make)
    except OSError:
        if not path.is_dir():  # another process was not quicker: it is a real fault
            raise
