"""Progress of long commands, with the time left: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

EVERY = 30.0  # seconds between lines, where there is no terminal

Tell = Callable[
    [str, float], None
]  # takes what is being done and how much of the total was just done


@contextmanager
def progress(total: float) -> Iterator[Tell]:
    """Shows how much of the total is done, on standard error."""
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        place = bar.add_task("", total=total)

        def tell(what: str, more: float) -> None:
            bar.update(place, advance=more, description=what)

        yield tell


def _lines(total: float) -> Tell:
    """For logs. What is left is told by the pace since the line before: what an earlier run had done comes
    all at once and says nothing of it."""
    began = shown = time.monotonic()
    done = since = 0.0

    def tell(what: str, more: float) -> None:
        nonlocal shown, done, since
        done, since = done + more, since + more
        now = time.monotonic()
        if now - shown < EVERY:
            return
        left = max(0.0, total - done) * (now - shown) / since if since else float("inf")
        share = 100 * done / total if total else 100.0
        print(
            f"{what}: {share:.0f} %, {_clock(now - began)}, left {_clock(left)}",
            file=sys.stderr,
            flush=True,
        )
        shown, since = now, 0.0

    return tell


def _clock(seconds: float) -> str:
    """
    >>> _clock(3725.4), _clock(float("inf"))
    ('1:02:05', 'unknown')
    """
    return "unknown" if seconds == float("inf") else str(timedelta(seconds=int(seconds)))
