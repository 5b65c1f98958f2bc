"""Contexts of a hundred thousand tokens: built, streamed and scored at constant memory."""

import resource
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.library import Library
from atlas_lm.evaluate import registry
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.reader import Reader
from atlas_lm.evaluate.runner import run
from atlas_lm.evaluate.sessions import AtlasSession
from atlas_lm.evaluate.tasks.options import Options
from atlas_lm.models import AtlasForCausalLM, configure
from atlas_lm.runs.journal import Journal
from atlas_lm.text import HuggingFaceTokenizer


def untrained() -> Reader:
    torch.manual_seed(0)
    model = AtlasForCausalLM(configure("gated_deltanet", size="tiny", vocab_size=50257)).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer())
    return open_reader(model, HuggingFaceTokenizer(tokenizer), name="tiny")


def counting(start: Callable[[], AtlasSession], seen: list[int]) -> Callable[[], AtlasSession]:
    """Sessions that count the columns of each call."""

    def begin() -> AtlasSession:
        session = start()
        read = session.read

        def counted(ids, valid, keep):
            seen.append(ids.shape[1])
            return read(ids, valid, keep)

        session.read = counted  # type: ignore[method-assign]
        return session

    return begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_hundred_thousand_tokens_at_constant_memory(tmp_path: Path) -> None:
    reader, seen = untrained(), []
    reader.start = counting(reader.start, seen)
    peaks, records = {}, {}
    for length in ("10k", "100k"):
        options = Options(library=Library(small=True), lengths=(length,), count=1)
        journal = Journal(tmp_path / length, {}, {})
        seen.clear()
        run(registry.build(["babilong/qa1"], options), reader, journal, 1)
        peaks[length] = peak_mib()
        [records[length]] = journal.records.values()
        assert sum(seen) >= records[length]["tokens"]
        assert max(seen) == reader.stride  # never more at once
    assert records["100k"]["tokens"] == records["100k"]["gpt2_tokens"] > 99_000
    assert records["100k"]["score"] in (0.0, 1.0) and records["100k"]["truncated"] == 0
    assert peaks["100k"] - peaks["10k"] < 16
