"""Every task from end to end, on the data of the package."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from atlas_lm.data.files import book_texts, enwik8, json_lines, wikitext
from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.library import Library
from atlas_lm.evaluate import registry, requests
from atlas_lm.evaluate.opening import open_reader
from atlas_lm.evaluate.reader import Reader
from atlas_lm.evaluate.results import evaluate
from atlas_lm.evaluate.runner import Outcome, run
from atlas_lm.evaluate.task import Record
from atlas_lm.evaluate.tasks import harness
from atlas_lm.evaluate.tasks.options import Options
from atlas_lm.models import AtlasForCausalLM, configure
from atlas_lm.runs.journal import Journal
from atlas_lm.text import ByteTokenizer, HuggingFaceTokenizer
from tests.evaluate.builders import log_probabilities, reader

SMALL = Library(small=True)
RECALL = Path(__file__).parent.parent.parent / "examples" / "recall-tiny"


def outcome(
    names: list[str], folder: Path, examined: Reader | None = None, batch: int = 4, **options: Any
) -> tuple[Outcome, list[Record]]:
    """What a run of tasks gives, and its records."""
    tasks = registry.build(names, Options(library=SMALL, **options))
    journal = Journal(folder, {}, {})
    found = run(tasks, examined or reader("delta", stride=512), journal, batch)
    return found, list(journal.records.values())


@pytest.fixture(scope="module")
def recall() -> Reader:
    return open_reader(
        AtlasForCausalLM.from_pretrained(RECALL).eval(), ByteTokenizer(), name="recall-tiny"
    )


def test_babilong(tmp_path: Path) -> None:
    found, records = outcome(["babilong"], tmp_path, lengths=("0k", "1k"), count=2)
    assert [tuple(row.cell.values()) for row in found.rows] == [
        *((f"qa{i}", length) for length in ("0k", "1k") for i in range(1, 6)),
        ("average", "0k"),
        ("average", "1k"),
    ]
    assert len(records) == 20 and [row.count for row in found.rows] == [2] * 10 + [10] * 2
    first = records[0]
    assert first["id"] == "babilong/qa1/0k/1"  # the first of the published hundred
    assert first["question"] == "Where is Mary?" and first["targets"] == ["bathroom"]
    assert first["prompt"].endswith(f"Question: {first['question']}") and first["truncated"] == 0
    long = next(record for record in records if "/1k/" in record["id"])
    assert 650 < long["gpt2_tokens"] < 1000 and len(long["prompt_sha256"]) == 64


def test_babilong_of_other_tasks_splits_and_styles(tmp_path: Path) -> None:
    found, records = outcome(
        ["babilong/qa7", "babilong/qa10"], tmp_path / "a", lengths=("0k",), count=3, style="plain"
    )
    assert [row.cell["question"] for row in found.rows] == ["qa7", "qa10", "average"]
    assert records[0]["prompt"].endswith("\nAnswer:")
    for split in ("train", "validation"):
        _, others = outcome(
            ["babilong/qa2"], tmp_path / split, lengths=("1k",), count=2, split=split
        )
        assert len(others) == 2


@pytest.mark.parametrize("kind", ["delta", "llama"])
def test_ruler(kind: str, tmp_path: Path) -> None:
    found, records = outcome(
        ["ruler"], tmp_path, reader(kind, stride=512), lengths=("1k",), count=1, batch=1
    )
    if kind == "llama":  # it takes 96 tokens
        assert not found.rows and len(found.refusals) == 9
        assert "llama takes 96" in found.refusals[0].reason
    else:
        assert len(found.rows) == 9 + 1 and all(0 <= record["score"] <= 1 for record in records)
        most = {record["id"].split("/")[1]: record["gpt2_tokens"] for record in records}
        assert most.pop("variables") <= 1024 - 30  # answers are as long as RULER lets them be
        assert all(tokens <= 1024 - 128 for tokens in most.values())


def test_ruler_truncated_is_marked(tmp_path: Path) -> None:
    cut = reader("llama", truncate=True, stride=64)
    cut.limit = 800
    found, records = outcome(["ruler/single_1"], tmp_path, cut, lengths=("1k",), count=2)
    assert found.rows[0].notes == ("2 of 2 truncated",)
    assert records[0]["truncated"] > 2000 and records[0]["tokens"] == 800 - 5 * 128


@pytest.mark.parametrize("name", ["boolq", "drop", "books/context"])
def test_what_other_tasks_cut_is_marked_too(name: str, tmp_path: Path) -> None:
    lengths = ("1k",) if name.startswith("books") else None
    wanted = {"count": 1, "lengths": lengths, "batch": 1}
    refused, none = outcome([name], tmp_path / "a", reader("llama", stride=64), **wanted)
    assert not none and "llama takes 96" in refused.refusals[0].reason
    cut = reader("llama", truncate=True, stride=64)
    # of drop's, 256 are for the answer; of a book's, 1,024 are to be foretold
    cut.limit = {"boolq": 200, "drop": 400, "books/context": 1100}[name]
    found, [record] = outcome([name], tmp_path / "b", cut, **wanted)
    assert record["truncated"] > 0
    assert all("1 of 1 truncated" in row.notes for row in found.rows)


def test_robustness_of_a_trained_memory(recall: Reader, tmp_path: Path) -> None:
    """recall-tiny keeps its facts when nothing happens, and loses them under enough noise."""
    found, _ = outcome(
        ["robustness/noise", "robustness/correction"],
        tmp_path,
        recall,
        style="letters",
        lengths=("0", "256"),
        count=24,
        batch=24,
    )
    shares = {tuple(row.cell.values()): row.value for row in found.rows}
    assert shares["noise", "0"] == 1 and shares["noise", "256"] < 0.7
    assert shares["correction", "256"] == 1


def test_books_by_position_and_context(tmp_path: Path) -> None:
    found, records = outcome(["books"], tmp_path, lengths=("2k",))
    by_position = {row.cell["position"]: row.value for row in found.rows[:4]}
    assert list(by_position) == ["256", "512", "1024", "2000"]
    [context] = [row for row in found.rows if row.task == "books/context"]
    assert context.cell == {"context": "2k"} and context.metric == "nats per token"
    book = Library(small=True).find("books/test")
    assert book.sample and records[0]["book"] == "10449"


@pytest.mark.parametrize(("name", "length"), [("books/position", "300"), ("enwik8", "400")])
def test_windows_of_a_model_with_a_limit_are_told(name: str, length: str, tmp_path: Path) -> None:
    """Such a model reads on in windows; a number from them is marked, one of a whole text is not."""
    found, _ = outcome([name], tmp_path / "a", reader("llama"), lengths=(length,), count=1)
    assert all("1 of 1 read in windows of 96 tokens" in row.notes for row in found.rows)
    found, _ = outcome([name], tmp_path / "b", reader("llama"), lengths=("90",), count=1)
    assert not any("windows" in note for row in found.rows for note in row.notes)


def test_the_loss_by_position_is_that_of_the_model(tmp_path: Path) -> None:
    found, _ = outcome(["books/position"], tmp_path, lengths=("300",))
    ids = ByteTokenizer().encode(next(book_texts("test", SMALL))[1][:2400])[:300]
    table = log_probabilities("delta", ids)[:-1]
    nats = -table.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0].numpy()
    assert found.rows[0].value == pytest.approx(nats[:255].mean(), rel=1e-4)
    assert found.rows[1].value == pytest.approx(nats[255:].mean(), rel=1e-4)


def test_a_longer_context_ends_with_the_same_tokens(tmp_path: Path) -> None:
    """With no context the target has none; the losses of both cells are of the same last tokens."""
    found, records = outcome(["books/context"], tmp_path, lengths=("0", "64"))
    assert [record["tokens"] for record in records] == [1024, 1088]
    assert len(found.rows) == 2


def test_bits_per_byte_of_enwik8(tmp_path: Path) -> None:
    found, [record] = outcome(["enwik8"], tmp_path, lengths=("400",))
    data = enwik8(SMALL)[:400]
    ids = ByteTokenizer().encode(data.decode("utf-8", errors="ignore"))
    table = log_probabilities("delta", ids)[:-1]
    nats = -table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum().item()
    assert record["bytes"] == len(ids) - 1
    assert found.rows[0].value == pytest.approx(nats / math.log(2) / (len(ids) - 1), rel=1e-4)


@pytest.mark.parametrize("name", ["mqar/4", "cued", "mad/in-context-recall"])
def test_tasks_of_their_own_vocabulary(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    knows = AtlasForCausalLM(configure("gated_deltanet", vocab_size=8192)).eval()
    examined = open_reader(knows, ByteTokenizer(), name="knows")
    found, records = outcome([name], tmp_path, examined, count=6)
    assert found.rows[0].count == 6 and found.rows[0].value < 0.5
    assert all(record["right"] <= record["asked"] for record in records)


def refusal(names: list[str], folder: Path, examined: Reader | None = None, **options: Any) -> str:
    """Why a cell was refused, while others of the run are not touched."""
    found, records = outcome(names, folder, examined, count=1, **options)
    assert not records and len(found.refusals) == 1
    return found.refusals[0].reason


def test_what_cannot_be_asked_is_refused_and_other_cells_run(tmp_path: Path) -> None:
    few = AtlasForCausalLM(configure("gated_deltanet", vocab_size=64)).eval()
    narrow = open_reader(few, ByteTokenizer(), name="few")
    assert "mqar has 256 tokens and few knows 64" in refusal(["mqar/4"], tmp_path / "a", narrow)
    assert "atlas train mad task=compression" in refusal(["mad/compression"], tmp_path / "b")
    llama = reader("llama")
    assert "mqar have 240 tokens, but llama takes 96" in refusal(["mqar/60"], tmp_path / "c", llama)
    found, _ = outcome(["babilong/qa1"], tmp_path / "d", lengths=("0k", "1M"), count=1)
    assert [row.cell["length"] for row in found.rows] == ["0k"]
    assert "and the texts have" in found.refusals[0].reason


def test_shares_count_every_labelled_place_alike() -> None:
    """As the exams of `atlas train` measure: rows that ask more count more."""
    cell = {"task": "in-context-recall"}
    records = [
        {"cell": cell, "score": 1.0, "right": 1, "asked": 1},
        {"cell": cell, "score": 0.0, "right": 0, "asked": 3},
    ]
    task = registry.build(["mad/in-context-recall"], Options(library=SMALL))[0]
    assert [row.value for row in task.rows(records)] == [0.25]


def test_a_truncated_context_keeps_what_is_to_be_foretold(tmp_path: Path) -> None:
    cut = reader("llama", truncate=True, stride=512, limit=1500)
    _, [record] = outcome(["books/context"], tmp_path, cut, lengths=("1k",), count=1)
    assert record["truncated"] == 1000 + 1024 - 1500 and record["tokens"] == 1500
    cut.limit = 1000
    assert "1,024 tokens are to be foretold, but llama takes 1,000" in refusal(
        ["books/context"], tmp_path / "b", cut, lengths=("1k",)
    )


def test_answers_in_bytes_may_be_as_long_as_in_tokens(tmp_path: Path) -> None:
    """Twenty tokens of an answer are a sentence, twenty bytes are not."""
    examined = reader("delta", stride=512)
    examined.ends = frozenset()
    _, [record] = outcome(["babilong/qa1"], tmp_path, examined, lengths=("0k",), count=1)
    said = record["answer"].encode("utf-8", errors="replace")
    assert "." in record["answer"] or len(said) >= 100


def test_long_documents_come_first(tmp_path: Path) -> None:
    [task] = registry.build(["boolq"], Options(library=SMALL))
    sizes = [sample.tokens for sample in task.samples()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_task_that_draws_answers_by_chance_is_refused() -> None:
    assert requests._generation({"until": "Q:", "max_new_tokens": 7}) == (["Q:"], 7)
    assert requests._generation({"until": ["", "x"], "do_sample": True, "temperature": 0})[0] == [
        "x"
    ]
    with pytest.raises(ValueError, match="set do_sample to false"):
        requests._generation({"do_sample": True})


def test_a_continuation_without_a_token_of_its_own_is_refused() -> None:
    examined = reader("delta")
    examined.tokenizer = HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer())
    )
    assert len(examined.tokenizer.encode("hello")) == 1
    with pytest.raises(ValueError, match="'lo' has no token of its own after 'hel'"):
        requests.encode_pair(examined, "hel", "lo")


HARNESS = dict.fromkeys(harness.SOURCES, 3) | {"wikitext": 1}


@pytest.mark.parametrize("name", HARNESS)
def test_tasks_of_the_harness(name: str, tmp_path: Path) -> None:
    examined = reader("delta", stride=512)
    tasks = registry.build([name], Options(library=SMALL, count=HARNESS[name]))
    found = evaluate(tasks, examined, tmp_path, batch=2)
    records = list(map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines()))
    assert len(records) == HARNESS[name] and found.rows
    for row in found.rows:
        assert row.count == HARNESS[name] and math.isfinite(row.value)
    assert all(record["responses"] for record in records)


def test_choices_are_weighed_as_the_model_does(tmp_path: Path) -> None:
    """HellaSwag, by hand: the ending with the highest log-likelihood, plain and per letter."""
    found, records = outcome(["hellaswag"], tmp_path, reader("delta", stride=512), count=4)
    encode = ByteTokenizer().encode
    right = {"acc": 0, "acc_norm": 0}
    docs = json_lines("hellaswag", SMALL)
    for record in records:
        sums = []
        for ending in record["continuations"]:
            ids = encode(record["prompts"][0] + ending)
            start = len(encode(record["prompts"][0]))
            table = log_probabilities("delta", ids)[start - 1 : -1]
            sums.append(sum(table[i, token].item() for i, token in enumerate(ids[start:])))
        told = [response[0] for response in record["responses"]]
        assert told == pytest.approx(sums, rel=1e-4)
        label = docs[int(record["id"].rpartition("/")[2])]["label"]
        lengths = [len(ending) - 1 for ending in record["continuations"]]
        right["acc"] += int(np.argmax(sums)) == label
        right["acc_norm"] += int(np.argmax(np.array(sums) / lengths)) == label
    shares = {row.metric: row.value for row in found.rows}
    assert shares == {metric: count / 4 for metric, count in right.items()}


def test_contexts_and_continuations_are_cut_as_the_harness_cuts_them() -> None:
    from lm_eval.api.model import TemplateLM

    examined = reader("llama")

    class Cutting:
        backend = "causal"

        def tok_encode(self, text: str) -> list[int]:
            return examined.tokenizer.encode(text)

    for context, continuation in (("Q: a\nA:", " b"), ("ends in space ", "x"), ("a\n\n", "b c")):
        theirs = TemplateLM._encode_pair(Cutting(), context, continuation)
        assert requests.encode_pair(examined, context, continuation) == theirs


def test_the_word_perplexity_of_wikitext_by_hand(tmp_path: Path) -> None:
    found, [record] = outcome(["wikitext"], tmp_path, count=1, batch=1)
    page = next(harness.articles(wikitext("test", SMALL)))
    words = {row.metric: row.value for row in found.rows}
    nats = -record["responses"][0]
    assert words["word_perplexity"] == pytest.approx(math.exp(nats / len(page.split())), rel=1e-6)
    [text] = record["prompts"]
    ids = ByteTokenizer().encode(text)
    table = log_probabilities("delta", ids)[:-1]
    wanted = -table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum().item()
    assert nats == pytest.approx(wanted, rel=1e-4)


def test_articles_are_cut_at_their_titles() -> None:
    raw = " \n = One = \n\n text \n = = Part = = \n more \n = Two = \n end \n"
    assert list(harness.articles(raw)) == [
        "= One = \n\n text \n = = Part = = \n more",
        "= Two = \n end",
    ]


def test_two_evaluations_of_a_model_differ_by_nothing(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        outcome(["babilong/qa1", "ruler/single_2"], tmp_path / folder, lengths=("1k",), count=2)
    one, two = ((tmp_path / folder / "records.jsonl").read_bytes() for folder in ("a", "b"))
    assert one == two


@pytest.mark.parametrize(
    ("names", "options", "wanted"),
    [
        (["nothing"], {}, "task is 'nothing', wanted some of babilong"),
        (["babilong/qa99"], {}, "babilong has no 'qa99'"),
        (["ruler/x"], {}, "ruler has no 'x'"),
        (["robustness/fire"], {}, "robustness has no 'fire'"),
        (["robustness"], {"lengths": ("4k",)}, "wanted numbers of hostile"),
        (["robustness"], {"style": "odes"}, "wanted one of letters"),
        (["books/pages"], {}, "books has no 'pages'"),
        (["books/position"], {"lengths": ("1k", "2k")}, "takes one length"),
        (["books/position"], {"count": 2}, "2 samples of books"),
        (["mqar/x"], {}, "wanted a number of pairs"),
        (["mad/x"], {}, "mad has no 'x'"),
        (["cued/x"], {}, "cued has no parts"),
        (["hellaswag/x"], {}, "hellaswag has no parts"),
        (["piqa"], {"lengths": ("4k",)}, "piqa has no choice of lengths"),
        (["ruler"], {"style": "plain"}, "ruler has no choice of style"),
        (["babilong"], {"lengths": ("4z",)}, "wanted a number of tokens"),
    ],
)
def test_mistakes_are_told_before_anything_runs(names, options, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        registry.build(names, Options(library=SMALL, **options))


@pytest.mark.parametrize(
    ("names", "options", "wanted"),
    [
        (
            ["babilong/qa1"],
            {"count": 2000, "lengths": ("0k",)},
            "2000 samples of qa1 .test. are wanted",
        ),
        (["piqa"], {"count": 21}, "21 samples of piqa are wanted, and there are 20"),
        (["books/position"], {"lengths": ("1M",)}, "are wanted; take a shorter"),
    ],
)
def test_what_the_data_does_not_hold_is_told(names, options, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=wanted):
        outcome(names, tmp_path, **options)


def test_groups_and_parts_are_joined() -> None:
    tasks = registry.build(["recall_qa", "babilong/qa1", "babilong/qa3"], Options(library=SMALL))
    assert [task.name for task in tasks] == ["squad", "drop", "nq_open", "babilong"]
    assert tasks[-1].settings["questions"] == ["qa1", "qa3"]
