"""Tasks of EleutherAI's lm-evaluation-harness on local files: its prompts and metrics, our runner.

The harness makes the questions and scores the answers; reading, batching, resuming and recording are ours.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atlas_lm.data.files import json_lines, wikitext
from atlas_lm.data.library import Library
from atlas_lm.evaluate.intervals import wilson
from atlas_lm.evaluate.reader import Reader, Tell
from atlas_lm.evaluate.requests import RESPOND, Response
from atlas_lm.evaluate.task import Record, Row, Sample, truncation, windowing
from atlas_lm.evaluate.tasks.options import Options, first_few

Doc = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a task of the harness gets its documents here."""

    item: str  # of the catalogue
    config: str | None  # file of the harness below its folder of tasks; None: the task is our own
    split: str  # that the harness asks for
    change: Callable[[Doc], Doc] = lambda doc: doc  # to the fields that the harness knows


def _choices(doc: Doc) -> Doc:
    """ARC's test file has choices as a list and the answer as a place."""
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    choices = {"text": doc["choices"], "label": labels}
    return {**doc, "choices": choices, "answerKey": labels[doc["label"]]}


def _validated(doc: Doc) -> Doc:
    """DROP's answers in the fields of the published file."""
    empty = {"day": "", "month": "", "year": ""}
    answers = [{"number": "", "date": empty, "spans": list(spans)} for spans in doc["answers"]]
    rest = {key: [answer[key] for answer in answers[1:]] for key in ("number", "date", "spans")}
    return {**doc, "answer": answers[0], "validated_answers": rest}


SOURCES = {
    "wikitext": Source(item="wikitext", config="wikitext/wikitext.yaml", split="test"),
    "lambada": Source(item="lambada", config="lambada/lambada_openai.yaml", split="test"),
    "piqa": Source(item="piqa", config="piqa/piqa.yaml", split="validation"),
    "hellaswag": Source(item="hellaswag", config="hellaswag/hellaswag.yaml", split="validation"),
    "winogrande": Source(item="winogrande", config="winogrande/default.yaml", split="validation"),
    "arc_easy": Source(item="arc_easy", config="arc/arc_easy.yaml", split="test", change=_choices),
    "arc_challenge": Source(
        item="arc_challenge", config="arc/arc_challenge.yaml", split="test", change=_choices
    ),
    "boolq": Source(
        item="boolq",
        config="super_glue/boolq/default.yaml",
        split="validation",
        change=lambda doc: {**doc, "label": int(doc["answer"])},
    ),
    "openbookqa": Source(item="openbookqa", config="openbookqa/openbookqa.yaml", split="test"),
    "squad": Source(item="squad", config=None, split="validation"),
    "drop": Source(item="drop", config="drop/default.yaml", split="validation", change=_validated),
    "nq_open": Source(item="nq_open", config="nq_open/nq_open.yaml", split="validation"),
}
GROUPS = {
    "commonsense": (
        "piqa",
        "hellaswag",
        "winogrande",
        "arc_easy",
        "arc_challenge",
        "boolq",
        "openbookqa",
    ),
    "recall_qa": ("squad", "drop", "nq_open"),
}


class Harness:
    """One task of the harness.

    Args:
        chat: renders messages, for models that are asked in a chat.
    """

    axis = None

    def __init__(self, name: str, options: Options, chat: Callable[..., str] | None = None) -> None:
        options.check(name)
        self.name = name
        self._options = options
        self._chat = chat
        self._found = options.library.find(SOURCES[name].item)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "harness": version("lm-eval"),
            "task_version": str(self._task.VERSION),
            "count": len(self._requests),
            "data": {self.name: [self._found.description, self._found.fingerprint]},
        }

    def samples(self) -> list[Sample]:
        """Questions in the order of their length, so that those side by side are alike; the longest come
        first, so that what a model cannot take shows at once."""
        made = [
            Sample(id=f"{self.name}/{index}", cell={}, index=index, tokens=_size(group))
            for index, group in enumerate(self._requests)
        ]
        return sorted(made, key=lambda sample: (-sample.tokens, sample.index))

    def examine(self, reader: Reader, samples: Sequence[Sample], tell: Tell) -> list[Record]:
        groups = [self._requests[sample.index] for sample in samples]
        flat = [request for group in groups for request in group]
        told: dict[int, list[Response]] = {}  # by document
        for kind, respond in RESPOND.items():
            chosen = [request for request in flat if request.request_type == kind]
            responses = respond(reader, chosen, tell) if chosen else []
            for request, response in zip(chosen, responses, strict=True):
                request.resps = [response.value]
                told.setdefault(request.doc_id, []).append(response)
        self._task._instances = flat
        with _quiet():
            self._task.apply_filters()
        return [self._record(group, told[group[0].doc_id]) for group in groups]

    def rows(self, records: Sequence[Record]) -> list[Row]:
        return [self._row(metric, records) for metric in records[0]["metrics"]]

    def _row(self, metric: str, records: Sequence[Record]) -> Row:
        items = [_item(record["metrics"][metric]) for record in records]
        value = float(self._task.aggregation()[metric](items))
        shares = all(item in (0, 1) for item in items)
        low, high = wilson(value, len(items)) if shares else (None, None)
        return Row(
            task=self.name,
            cell={},
            metric=metric,
            value=value,
            count=len(items),
            low=low,
            high=high,
            notes=(*truncation(records), *windowing(records)),
        )

    def show(self, reader: Reader, sample: Sample) -> str:
        """What the model is told of a sample: contexts, each with what is to be weighed after it."""
        return "\n\n".join("".join(map(str, r.args)) for r in self._requests[sample.index])

    def _record(self, requests: list[Any], told: Sequence[Response]) -> Record:
        key = next(iter(requests[0].filtered_resps))
        results = [request.filtered_resps[key] for request in requests]
        metrics = self._task.process_results(requests[0].doc, results)
        return {
            "metrics": {name: _plain(value) for name, value in metrics.items()},
            "prompts": list(dict.fromkeys(request.args[0] for request in requests)),
            "continuations": [_plain(request.args[1]) for request in requests if request.args[1:]],
            "responses": [_plain(request.resps[0]) for request in requests],
            "truncated": max(response.left_out for response in told),
            "window": told[0].window,
        }

    @functools.cached_property
    def _task(self) -> Any:
        return load_task(self.name, self._options.library)

    @functools.cached_property
    def _requests(self) -> list[list[Any]]:
        """Of each document what the harness wants to know about it."""
        there = len(self._task.eval_docs)
        with _quiet():
            self._task.build_all_requests(
                limit=first_few(self._options.count, there, self.name),
                apply_chat_template=self._chat is not None,
                chat_template=self._chat,
            )
        groups: dict[int, list[Any]] = {}
        for request in self._task.instances:
            groups.setdefault(request.doc_id, []).append(request)
        return list(groups.values())


def _size(requests: list[Any]) -> int:
    """About so many tokens: a context that several share counts once."""
    letters = {part for request in requests for part in request.args if isinstance(part, str)}
    return 1 + sum(map(len, letters)) // 4


def load_task(name: str, library: Library) -> Any:
    """A task of the harness that reads its documents from our files."""
    try:
        import lm_eval.tasks
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{name} runs through lm-evaluation-harness, which is not here; pip install 'atlas-lm[eval]'",
            name="lm_eval",
        ) from missing
    source = SOURCES[name]
    folder = Path(lm_eval.tasks.__file__).parent
    config = SQUAD if source.config is None else load_yaml(folder / source.config)
    config = {key: value for key, value in config.items() if key != "tag"}
    changes = {
        "task": name,
        "custom_dataset": functools.partial(_dataset, source, library),
        "dataset_kwargs": None,
    }
    with _quiet():
        return ConfigurableTask(config=config | changes)


def _dataset(source: Source, library: Library, **kwargs: Any) -> dict[str, Any]:
    """The documents in the form that the harness expects, under every split that it may ask for."""
    import datasets

    datasets.disable_progress_bars()
    docs = list(_documents(source, library))
    made = datasets.Dataset.from_list(docs)
    return dict.fromkeys((source.split, "train", "validation", "test"), made)


def _documents(source: Source, library: Library) -> Iterator[Doc]:
    if source.item == "wikitext":
        yield from ({"page": page} for page in articles(wikitext(source.split, library)))
    else:
        yield from (source.change(doc) for doc in json_lines(source.item, library))


def articles(raw: str) -> Iterator[str]:
    """The articles of a WikiText file; each begins with its title, ` = Title = `, on a line of its own."""
    lines: list[str] = []
    for line in raw.splitlines(keepends=True):
        words = line.strip()
        title = words.startswith("= ") and words.endswith(" =") and not words.startswith("= =")
        if title and any(part.strip() for part in lines):
            yield "".join(lines).strip()
            lines = []
        lines.append(line)
    if any(part.strip() for part in lines):
        yield "".join(lines).strip()


def _contains(doc: Doc, results: list[str]) -> dict[str, float]:
    """Whether the answer holds one of the right ones."""
    return {"contains": float(any(a.lower() in results[0].lower() for a in doc["answers"]))}


def _mean(items: list[float]) -> float:
    return sum(items) / len(items)


SQUAD: dict[str, Any] = {  # no task of the harness takes SQuAD 1.1 from a file
    "output_type": "generate_until",
    "validation_split": "validation",
    "doc_to_text": "Title: {{title}}\n\nBackground: {{context}}\n\nQuestion: {{question}}\n\nAnswer:",
    "doc_to_target": "{{answers[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48, "do_sample": False},
    "process_results": _contains,
    "metric_list": [{"metric": "contains", "aggregation": _mean, "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


def _item(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness' remarks and bars, of which every document would have some."""
    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    import lm_eval.api.task as made

    bar = made.tqdm
    logger.setLevel(logging.ERROR)
    made.tqdm = lambda things, **_: things
    try:
        yield
    finally:
        logger.setLevel(level)
        made.tqdm = bar
