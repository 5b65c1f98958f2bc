"""Tasks that ask a question about a text and look at what a model says."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from atlas_lm.data.asked import Asked
from atlas_lm.data.prompt import Prompt
from atlas_lm.evaluate.reader import Reader, Refused, Tell
from atlas_lm.evaluate.task import Record, Row, Sample, share_rows

SHOWN = 4096  # characters of a prompt that a record holds; of longer ones its two ends


class Asking(ABC):
    """A task whose samples are questions in text, scored between 0 and 1."""

    name: str
    axis: str | None

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]: ...

    @abstractmethod
    def samples(self) -> Sequence[Sample]: ...

    @abstractmethod
    def make(self, sample: Sample) -> Asked:
        """The question itself."""

    @abstractmethod
    def score(self, sample: Sample, asked: Asked, answer: str) -> float:
        """How right an answer is, 0 to 1."""

    def complete(self, answer: str) -> bool:
        """Whether nothing that is still to come can change the score."""
        return False

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        try:
            asked = [self.make(sample) for sample in samples]
        except (
            ValueError
        ) as error:  # too short for what is told, too long for the texts that are here
            raise Refused(str(error)) from error
        said = [reader.said(one.prompt, one.lead) for one in asked]
        most = reader.per_token * max(one.most for one in asked)
        lines = [reader.line(text, most) for text in said]
        answers = reader.answers(lines, most, self.complete, tell)
        return [
            {
                "score": self.score(sample, one, answer),
                "answer": answer,
                "targets": list(one.targets),
                **one.notes,
                **_told(text),
                "tokens": len(line),
                "truncated": line.left_out,
            }
            for sample, one, text, line, answer in zip(
                samples, asked, said, lines, answers, strict=True
            )
        ]

    def show(self, reader: Reader, sample: Sample) -> str:
        """All that the model is told of a sample."""
        asked = self.make(sample)
        return reader.said(asked.prompt, asked.lead).text()

    def rows(self, records: Sequence[Record]) -> list[Row]:
        return share_rows(self.name, records)


def _told(said: Prompt) -> dict[str, Any]:
    """What a model was told, for the record: the whole of a short text, the ends and a hash of a long one."""
    first = next(iter(said.pieces()))
    last = said.parts[-1] if isinstance(said.parts[-1], str) else ""
    short = len(said.parts) == 1 and len(first) <= SHOWN
    text: dict[str, Any] = {"prompt": first} if short else {"prompt_begins": first[:SHOWN]}
    if not short:
        text["prompt_ends"] = last[-SHOWN:]
    return {**text, "prompt_sha256": said.sha256, "gpt2_tokens": said.tokens}
