"""The command line of lm-evaluation-harness, with a model `atlas` that streams:

    python -m atlas_lm.cli.lm_eval run --model atlas --model_args pretrained=my-model --tasks lambada_openai

It takes every model that `atlas eval` takes, reads contexts in segments, and never cuts one in silence.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from atlas_lm.cli.models import open_any
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.requests import continue_until, foretell, weigh

logger = logging.getLogger(__name__)


@register_model("atlas")
class AtlasLM(LM):
    """A reader as the harness wants it.

    Args:
        pretrained: folder of a model, a .gguf file, or a name on the Hugging Face hub.
        stride: tokens per call of the model.
        limit: tokens that the model takes; by default what its configuration says.
        truncate: leave out the middle of what is too long instead of refusing it.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = "cpu",
        dtype: str | None = None,
        batch_size: int | str = 8,
        stride: int | None = None,
        limit: int | None = None,
        truncate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        unknown = [
            name for name, value in kwargs.items() if value is not None and name != "max_batch_size"
        ]
        if unknown:
            raise ValueError(f"the model atlas does not take {', '.join(unknown)}")
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            # the harness asks for cuda by default, and its own models do the same
            logger.warning("there is no CUDA device, so the model runs on the CPU")
            device = "cpu"
        if not str(batch_size).isdecimal():
            raise ValueError(f"batch_size is {batch_size!r}, wanted a number of contexts, e.g. 8")
        model, tokenizer = open_any(str(pretrained), device or "cpu", dtype)
        self.reader = open_reader(
            model,
            tokenizer,
            name=Path(str(pretrained)).resolve().name,
            stride=stride,
            limit=limit,
            truncate=truncate,
        )
        self.batch = int(batch_size) if self.reader.can.padded else 1

    @property
    def tokenizer_name(self) -> str:
        return self.reader.tokenizer.key

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.reader.chat_text(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return self._in_batches(requests, weigh)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return self._in_batches(requests, foretell)

    def generate_until(self, requests: list[Any]) -> list[str]:
        return self._in_batches(requests, continue_until)

    def _in_batches(self, requests: list[Any], respond: Any) -> list[Any]:
        """Requests that are alike side by side; answers in the order of the requests."""
        order = sorted(range(len(requests)), key=lambda place: _likeness(requests[place]))
        found: dict[int, Any] = {}
        cut = 0
        for group in _groups(order, requests, self.batch):
            chosen = [requests[place] for place in group]
            responses = respond(self.reader, chosen, lambda tokens: None)
            cut += sum(bool(response.left_out) for response in responses)
            for place, request, response in zip(group, chosen, responses, strict=True):
                found[place] = response.value
                self.cache_hook.add_partial(request.request_type, request.args, response.value)
        if cut:
            logger.warning("%d of %d contexts were too long and lost their middle", cut, len(found))
        return [found[place] for place in range(len(requests))]


def _likeness(request: Any) -> tuple[str, int, str]:
    """Same settings, then similar length, then the same context."""
    settings = json.dumps(request.args[1], sort_keys=True) if len(request.args) > 1 else ""
    if request.request_type == "loglikelihood":
        settings = ""
    return settings, len(request.args[0]), request.args[0]


def _groups(order: list[int], requests: list[Any], size: int) -> list[list[int]]:
    """Batches of so many contexts, all with the same settings."""
    groups: list[list[int]] = []
    contexts: set[str] = set()
    settings = None
    for place in order:
        alike, _, context = _likeness(requests[place])
        if not groups or alike != settings or (context not in contexts and len(contexts) == size):
            groups.append([])
            contexts, settings = set(), alike
        contexts.add(context)
        groups[-1].append(place)
    return groups


if __name__ == "__main__":
    cli_evaluate()
