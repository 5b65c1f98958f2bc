"""What may be chosen for a run, for every task alike."""

from dataclasses import dataclass, field

from atlas_lm.data.library import Library


@dataclass(frozen=True, kw_only=True)
class Options:
    lengths: tuple[str, ...] | None = None  # None: the task's own
    count: int | None = None  # samples of each cell; None: the task's own
    seed: int = 0
    split: str = "test"
    style: str | None = None  # of prompts or texts; None: the task's own
    library: Library = field(default_factory=Library)

    def check(self, task: str, *taken: str) -> None:
        """Refuse what a task would not heed."""
        usual = Options()
        given = [
            name
            for name in ("lengths", "split", "style")
            if getattr(self, name) != getattr(usual, name) and name not in taken
        ]
        if given:
            raise ValueError(f"{task} has no choice of {', '.join(given)}; leave that out for it")


def first_few(wanted: int | None, there: int, what: str) -> int:
    """How many samples to take of those that there are."""
    if wanted is None:
        return there
    if not 1 <= wanted <= there:
        raise ValueError(f"{wanted} samples of {what} are wanted, and there are {there}")
    return wanted
