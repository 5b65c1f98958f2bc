"""Files that are replaced as a whole: after a crash the old one is there or the new one, never a half.

POSIX only: a temporary is locked while it is written, so that what killed writers left can be told apart.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and save again",
    errno.EDQUOT: "your quota is used up: free some space and save again",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "the folder cannot be written to: change its permissions or choose another",
    errno.EPERM: "the folder cannot be written to: change its permissions or choose another",
    errno.ENOENT: "the folder does not exist: make it first, or correct the path",
    errno.ENOTDIR: "a part of the path is no folder: correct the path",
    errno.EISDIR: "the path is a folder: give the name of a file",
    errno.ENAMETOOLONG: "the name is too long: choose one of 200 characters or fewer",
}


def write_atomically(path: str | Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write the chunks beside `path`, make them durable, then let them take its name in one step.

    On any failure the temporary is removed and an older file under `path` stays as it was. A link is
    followed, and an older file's permissions are kept. What killed saves of this file left is removed.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _remove_stale(target)
        _replace(target, chunks)
    except OSError as error:
        kept = "the old file is untouched" if os.path.isfile(target) else "nothing was written"
        advice = ADVICE.get(error.errno or 0, "see the system's message")
        reason = f"could not save ({error.strerror or error}): {advice}; {kept}"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error
    _sync_folder(target.parent)


def temporaries(target: Path) -> list[Path]:
    """Unfinished saves of a file, of living and of dead processes."""
    first, last = _affixes(target)
    names = os.listdir(target.parent)
    return sorted(target.parent / n for n in names if n.startswith(first) and n.endswith(last))


def _affixes(target: Path) -> tuple[str, str]:
    return f".{target.name}.", ".partial"


def _replace(target: Path, chunks: Iterable[bytes | memoryview]) -> None:
    temporary, handle = _create(target)
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(handle)
            os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _create(target: Path) -> tuple[Path, int]:
    """A new temporary, locked. Before the lock another save may take it for a dead one and remove it;
    then the next is made."""
    first, last = _affixes(target)
    while True:
        temporary = target.parent / f"{first}{token_hex(4)}{last}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # without locks in the file system temporaries are never removed
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return temporary, handle
        os.close(handle)


def _remove_stale(target: Path) -> None:
    """Remove temporaries that no living process holds; a lock dies with its process."""
    for temporary in temporaries(target):
        with suppress(OSError):  # it is held, or another save was quicker
            handle = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(temporary)
            finally:
                os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
