"""A question in text: what is asked, how the answer begins, and what it should be."""

from dataclasses import dataclass, field
from typing import Any

from atlas_lm.data.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class Asked:
    prompt: Prompt  # all that is said to the model
    lead: str = ""  # how its answer begins; said for it
    targets: tuple[str, ...]  # what the answer should hold
    most: int  # tokens of the answer
    notes: dict[str, Any] = field(default_factory=dict)  # for the record: where things stand
