"""Progress of long commands on a terminal, with the time that is left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: float) -> Iterator[Callable[[str, float], None]]:
    """A bar; gives a function that takes what is being done and how much of the total was just done."""
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
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        place = bar.add_task("", total=total)

        def tell(what: str, done: float) -> None:
            bar.update(place, advance=done, description=what)

        yield tell
