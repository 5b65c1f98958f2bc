"""`atlas eval` and `atlas data` from the command line, and the model that lm-evaluation-harness gets."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from atlas_lm.cli.lm_eval import AtlasLM
from atlas_lm.data.gpt2 import END_OF_TEXT, gpt2_tokenizer
from atlas_lm.data.library import BUNDLED
from tests.cli.builders import atlas, make_model
from tests.evaluate.builders import SIZES, model

ROOT = Path(__file__).parent.parent.parent
RECALL = ROOT / "examples" / "recall-tiny"
LETTERS = ("robustness/noise", "--style", "letters", "--lengths", "0,8", "--batch", "2")


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_a_run_tells_its_table_and_leaves_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = atlas("eval", *LETTERS, "--model", RECALL, "--samples", 4, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "noise" in result.stdout and "100.0" in result.stdout and str(out) in result.stdout
    assert {p.name for p in out.iterdir()} == {
        "run.json",
        "records.jsonl",
        "table.md",
        "robustness.png",
    }
    assert len(records(out)) == 8
    again = atlas("eval", *LETTERS, "--model", RECALL, "--samples", 4, "--out", out)
    assert again.exit_code == 0 and len(records(out)) == 8


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    options = [*LETTERS, "--model", str(RECALL), "--samples", "40"]
    command = [sys.executable, "-c", "from atlas_lm.cli.main import main; main()", "eval", *options]
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path, deadline = out / "records.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = path.read_bytes()
    assert 6 <= done.count(b"\n") < 80
    result = atlas("eval", *options, "--out", out)
    assert result.exit_code == 0, result.stderr
    whole = atlas("eval", *options, "--out", tmp_path / "whole")
    assert whole.exit_code == 0
    assert path.read_bytes() == (tmp_path / "whole" / "records.jsonl").read_bytes()
    assert path.read_bytes().startswith(done[: done.rfind(b"\n") + 1])


def test_the_exact_prompt_of_a_sample_can_be_seen(tmp_path: Path) -> None:
    options = ("--model", RECALL, "--lengths", "1k", "--samples", 1, "--small")
    out = tmp_path / "out"
    assert atlas("eval", "babilong/qa1", *options, "--out", out).exit_code == 0
    [record] = records(out)
    shown = atlas("eval", "babilong/qa1", *options, "--show", record["id"])
    assert shown.exit_code == 0
    told = shown.stdout.removesuffix("\n")
    assert hashlib.sha256(told.encode()).hexdigest() == record["prompt_sha256"]
    piqa = atlas("eval", "piqa", "--model", RECALL, "--small", "--show", "piqa/0")
    assert piqa.exit_code == 0 and piqa.stdout.startswith("Question: ")
    missing = atlas("eval", "babilong/qa1", *options, "--show", "babilong/qa1/1k/x")
    assert missing.exit_code == 2 and "no sample" in missing.stderr


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = ("--model", RECALL, "--samples", 2, "--out", tmp_path)
    assert atlas("eval", *LETTERS, *first).exit_code == 0
    other = atlas("eval", *LETTERS, *first, "--seed", 5)
    assert other.exit_code == 2 and "another run" in other.stderr and "seed" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["babilong"], "no model is named"),
        (["nothing", "--model", RECALL], "wanted some of babilong"),
        (["babilong", "--model", "no/such/model"], "there is no folder no/such/model"),
        (["mqar", "--model", RECALL, "--device", "abacus"], "device 'abacus' cannot be used"),
        (["enwik8", "--model", RECALL, "--lengths", 0], "wanted 16 or more"),
        (["enwik8", "--model", RECALL, "--samples", 7], "is one stream"),
        (["babilong", "--model", "nothing.gguf"], "there is no file"),
        (["babilong", "--model", RECALL, "--dtype", "int3"], "wanted one of float32"),
        (["babilong", "--model", RECALL, "--device", "abacus"], "cannot be used"),
        (["babilong", "--model", RECALL, "--chat", "--samples", 1], "no chat template"),
        (["piqa", "--model", RECALL, "--lengths", "4k"], "no choice of lengths"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list, wanted: str, tmp_path: Path) -> None:
    result = atlas("eval", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2 and wanted in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_can_take_nothing_of_it_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    config = LlamaConfig(**SIZES | {"vocab_size": 50257}, max_position_embeddings=96)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer()).save_pretrained(folder)
    run = ("eval", "babilong/qa1", "--model", folder, "--samples", 1, "--small")
    result = atlas(*run, "--lengths", "4k", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "llama takes 96" in result.stdout.replace("\n", " ")
    result = atlas(*run, "--lengths", "0k", "--limit", "4096", "--out", tmp_path / "more")
    assert result.exit_code == 0 and len(records(tmp_path / "more")) == 1


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer()).save_pretrained(tmp_path)
    result = atlas("eval", "piqa", "--model", tmp_path, "--out", tmp_path / "out", "--small")
    assert result.exit_code == 2 and "the model only up to 258" in result.stderr


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """They would be random, and the results with them."""
    partial = {n: w for n, w in model("llama").state_dict().items() if "layers.1" not in n}
    model("llama").save_pretrained(tmp_path / "m", state_dict=partial)
    PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer()).save_pretrained(tmp_path / "m")
    result = atlas("eval", "piqa", "--model", tmp_path / "m", "--out", tmp_path / "out", "--small")
    assert result.exit_code == 2 and "lacks 9 of its weights" in result.stderr


def test_a_folder_that_is_no_data_and_damaged_data_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("eval", "lambada", "--model", RECALL, "--samples", 1, "--out", tmp_path / "out")
    assert "lambada: sample in the package" in atlas(*run).stdout
    monkeypatch.setenv("ATLAS_DATA", str(tmp_path / "none"))
    for result in (atlas(*run), atlas("data")):
        assert result.exit_code == 2 and "which is no folder" in result.stderr
    (tmp_path / "none" / "lambada").mkdir(parents=True)
    whole = (BUNDLED / "lambada" / "lambada_openai_test.jsonl.xz").read_bytes()
    (tmp_path / "none" / "lambada" / "lambada_openai_test.jsonl.xz").write_bytes(whole[:-60])
    result = atlas(*run)
    assert result.exit_code == 2 and "lambada_openai_test.jsonl.xz is damaged" in result.stderr


def test_tasks_are_listed() -> None:
    result = atlas("eval", "list")
    assert result.exit_code == 0 and "babilong" in result.stdout and "hellaswag" in result.stdout


def test_data_is_listed_with_sizes_licences_and_sources() -> None:
    result = atlas("data")
    assert result.exit_code == 0
    for wanted in ("books/test", "sample only", "CC BY-SA 4.0", "ATLAS_DATA", "Project-Gutenberg"):
        assert wanted in result.stdout
    items = json.loads(atlas("data", "--json").stdout)["items"]
    assert {item["state"] for item in items} == {"whole", "sample"}


def test_a_damaged_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "lambada" / "lambada_openai_test.jsonl.xz"
    target.parent.mkdir()
    target.write_bytes(b"not it")
    monkeypatch.setenv("ATLAS_DATA", str(tmp_path))
    assert atlas("data").exit_code == 0
    result = atlas("data", "--check")
    assert result.exit_code == 1 and "DAMAGED" in result.stdout
    assert "lambada_openai_test.jsonl.xz is not the file that it should be" in result.stderr


@pytest.fixture(scope="module")
def registered(tmp_path_factory) -> AtlasLM:
    folder = make_model(tmp_path_factory.mktemp("lm") / "model")
    return get_model("atlas")(pretrained=str(folder), batch_size=3)


def request(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_the_harness_gets_our_model(registered: AtlasLM) -> None:
    """Answers come in the order of the requests, and batches change nothing."""
    texts = ["one", "a much longer context than the others", "three", "one"]
    asked = [
        request("loglikelihood", text, f" {end}") for text in texts for end in ("yes", "no, not")
    ]
    together = registered.loglikelihood(asked)
    for one, found in zip(asked, together, strict=True):
        [alone] = registered.loglikelihood([one])
        assert found == (pytest.approx(alone[0], rel=1e-4), alone[1])
    rolling = [request("loglikelihood_rolling", text) for text in texts]
    sums = registered.loglikelihood_rolling(rolling)
    assert sums[0] == pytest.approx(sums[3]) and all(total < 0 for total in sums)
    settings = {"until": ["\n"], "max_gen_toks": 5}
    told = registered.generate_until([request("generate_until", text, settings) for text in texts])
    assert told[0] == told[3] and all("\n" not in text for text in told)


@pytest.mark.parametrize("marked", [False, True], ids=["no-bos", "bos"])
def test_answers_are_those_of_the_harness_own_model(marked: bool, tmp_path: Path) -> None:
    """Likelihoods, whole texts beyond the model's length, and continuations, beside lm-eval's own reading."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 50257, "eos_token_id": 50256}
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=96)).save_pretrained(tmp_path)
    fast = Tokenizer.from_str(gpt2_tokenizer().to_str())
    if marked:  # as Llama's: every text begins with a mark
        fast.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 50256)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT if marked else None
    )
    tokenizer.save_pretrained(tmp_path)
    ours = AtlasLM(pretrained=str(tmp_path), batch_size=2)
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=2)
    texts = ["One", "A question that is much longer than the others. Answer:", "ends in a space "]
    ends = (" yes", " no, not at all", "x")
    asked = [request("loglikelihood", text, end) for text in ["", *texts] for end in ends]
    found, wanted = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in wanted], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    long = " ".join(f"word{i}" for i in range(150))
    whole = [request("loglikelihood_rolling", text) for text in [*texts, long, long[:700]]]
    assert len(tokenizer(long)["input_ids"]) > 3 * 96
    if not marked:  # theirs reads two marks before a text, ours one
        assert ours.loglikelihood_rolling(whole) == pytest.approx(
            theirs.loglikelihood_rolling(whole), rel=1e-5
        )
    settings = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    open_ended = [request("generate_until", text, settings) for text in texts]
    assert ours.generate_until(open_ended) == theirs.generate_until(open_ended)


def test_options_that_the_model_would_not_heed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not take peft"):
        AtlasLM(pretrained=str(RECALL), peft="x")
