"""What a run tells to those who listen."""

from dataclasses import dataclass, field

from atlas_lm.train.checkpoint import Progress
from atlas_lm.train.examine import Mark


@dataclass(frozen=True, kw_only=True)
class Report:
    """One step, told to whoever listens."""

    step: int  # finished ones
    loss: float  # nats per labelled place, before the step
    norm: float  # of the gradient, before it was clipped
    rate: float
    tokens: int  # of this step
    labelled: int
    seconds: float  # of this step, from the end of the one before
    gates: dict[str, float] = field(default_factory=dict)  # now and then


class Listener:
    """Is told what happens in a run, in the first process. Does nothing by itself."""

    def resumed(self, progress: Progress) -> None:
        """Before the first step."""

    def stepped(self, report: Report) -> None: ...

    def examined(self, step: int, marks: dict[str, Mark]) -> None: ...

    def saving(self, step: int) -> None:
        """Before a checkpoint is written: what was told until now must be on disk."""

    def closed(self) -> None:
        """The run is over, however it ended: nothing more is told."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    progress: Progress
    marks: dict[str, Mark]  # of the last exam, if the run came to its end
    interrupted: bool
    waited: float  # share of the seconds that training waited for data
