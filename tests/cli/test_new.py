"""`atlas new`"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from atlas_lm.text import load_tokenizer
from tests.cli.builders import atlas, make_model
from tests.text.builders import byte_level


def test_the_model_can_be_opened_and_is_described(tmp_path: Path) -> None:
    result = atlas("new", tmp_path / "m", "--preset", "titans", "--block", "mac", "--json")
    record = json.loads(result.stdout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert record == {
        "folder": str(tmp_path / "m"),
        "preset": "titans",
        "blocks": ["mac", "mac"],
        "vocab_size": 259,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": model.initial_state(1).bytes,
        "grows": None,
    }
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, 258)


def test_the_text_tells_what_grows(tmp_path: Path) -> None:
    result = atlas("new", tmp_path / "m", "--preset", "transformer")
    assert "2 blocks attention, 259 ids" in result.stdout
    assert "grows with the text: full attention" in result.stdout


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(i), "--seed", i // 2) for i in range(3)]
    one, same, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    weights = [model.model.layers[0].state_dict() for model in (one, same, other)]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert not all(torch.equal(weights[0][n], weights[2][n]) for n in weights[0])


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    words = byte_level(tmp_path / "words", ("th", "the"))
    make_model(tmp_path / "m", "--tokenizer", words)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["vocab_size"] == 259 and config["eos_token_id"] == 258
    result = atlas("generate", tmp_path / "m", "--prompt", "the the", "--json")
    assert result.exit_code == 0, result.stderr
    make_model(tmp_path / "padded", "--tokenizer", words, "--vocab-size", 320)
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 320


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "elephant"], "preset is 'elephant', wanted one of"),
        (["--size", "9T"], "size is '9T', wanted one of"),
        (["--block", "brick"], "wanted some of"),
        (["--vocab-size", 100, "--tokenizer", "words"], "ids up to 256, the model only up to 99"),
        (["--tokenizer", "nowhere"], "nowhere is no folder"),
        (["--vocab-size", 0], "vocab_size is 0, wanted 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch, options, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    byte_level(tmp_path / "words")
    result = atlas("new", "m", *options)
    assert result.exit_code == 2
    assert "atlas new: " in result.stderr and message in result.stderr
    assert not (tmp_path / "m").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        result = atlas("new", folder)
        assert result.exit_code == 2 and "choose another name" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_gpt2_comes_with_the_package(tmp_path: Path) -> None:
    result = atlas("new", tmp_path / "m", "--preset", "gated_deltanet", "--tokenizer", "gpt2")
    assert result.exit_code == 0 and "50,257 ids" in result.stdout
    tokenizer = load_tokenizer(tmp_path / "m", 50257)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.special["eos_token_id"] == 50256
