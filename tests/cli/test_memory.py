"""`atlas memory`: what the commands say is what is in the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from atlas_lm.cli.common import load_model
from atlas_lm.cli.main import app
from atlas_lm.stream.compare import compare_predictions
from atlas_lm.stream.engine import Stream
from atlas_lm.stream.files import open_memory, save_memory
from atlas_lm.stream.header import read_header
from atlas_lm.stream.quantize import quantize
from tests.models.builders import small_model

TEXT = "A fork of a stream is another stream.\n" * 5


def atlas(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["memory", *map(str, arguments)])


def record(*arguments: object) -> Any:
    result = atlas(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: object) -> str:
    """The one line on stderr of a command that refuses."""
    result = atlas(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("atlas memory ")
    return result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two memories of it and a text."""
    folder = tmp_path_factory.mktemp("files")
    model = small_model("mag", "titans", vocab_size=259)
    model.save_pretrained(folder / "model")
    stream = Stream(model, stride=16)
    stream.absorb(list(b"The first memory has read this line."))
    save_memory(folder / "a.mem", model, stream.reading)
    stream.absorb(list(b" The second one also this."))
    save_memory(folder / "b.mem", model, stream.reading)
    (folder / "text.txt").write_text(TEXT)
    return folder


class TestShow:
    def test_without_the_model(self, folder: Path) -> None:
        found = record("show", folder / "a.mem")
        header = read_header(folder / "a.mem")
        assert (found["tokens"], found["pending"], found["stride"]) == (36, 4, 16)
        assert found["bytes"] == (folder / "a.mem").stat().st_size and found["bits"] is None
        assert found["checksum"] == header.checksum and found["config"] == header.config
        assert [layer["moved"] for layer in found["layers"]] == [None, None]
        state = open_memory(folder / "a.mem", load_model(folder / "model")).state
        for layer, mine in zip(found["layers"], state.layers, strict=True):
            assert mine.memory is not None
            for group in ("memory", "momentum"):
                parts = [part.view(-1) for part in getattr(mine.memory, group).values()]
                assert layer[group] == pytest.approx(float(torch.cat(parts).norm()), rel=1e-6)

    def test_with_the_model(self, folder: Path) -> None:
        near, far = (
            record("show", folder / name, "--model", folder / "model")["layers"]
            for name in ("a.mem", "b.mem")
        )
        assert all(
            0 < a["moved"] < b["moved"] and a["start"] > 0 for a, b in zip(near, far, strict=True)
        )

    def test_as_tables(self, folder: Path) -> None:
        result = atlas("show", folder / "a.mem")
        assert result.exit_code == 0
        for words in ("tokens read", "36", "checksum (verified)", "|momentum|"):
            assert words in result.stdout

    def test_refusals(self, folder: Path, tmp_path: Path) -> None:
        assert "no-such.mem: cannot be read" in refusal("show", tmp_path / "no-such.mem")
        assert "no memory file" in refusal("show", folder / "text.txt")
        damaged = bytearray((folder / "a.mem").read_bytes())
        damaged[-5] ^= 8
        (tmp_path / "c.mem").write_bytes(damaged)
        assert "it was changed after it was saved" in refusal("show", tmp_path / "c.mem")


class TestDiff:
    def test_tensors(self, folder: Path) -> None:
        found = record("diff", folder / "a.mem", folder / "b.mem")
        assert found["same_model"] and not found["equal"] and found["config_differences"] == []
        assert (found["a"]["tokens"], found["b"]["tokens"]) == (36, 62)
        assert 0 < found["tensors"]["layers.0.memory.memory.w0"] < 1
        assert "predictions" not in found

    def test_a_file_and_itself(self, folder: Path) -> None:
        found = record("diff", folder / "a.mem", folder / "a.mem")
        assert found["equal"] and set(found["tensors"].values()) == {0}

    def test_another_model(self, folder: Path, tmp_path: Path) -> None:
        other = small_model("mag", "titans", vocab_size=259, sliding_window=9)
        save_memory(tmp_path / "c.mem", other, Stream(other, stride=16).reading)
        found = record("diff", folder / "a.mem", tmp_path / "c.mem")
        assert not found["same_model"] and found["tensors"]["layers.0.tails.attention.k"] is None
        assert found["config_differences"] == ["sliding_window is 7 in A and 9 in B"]
        table = atlas("diff", folder / "a.mem", tmp_path / "c.mem").stdout
        assert "other shape" in table and "sliding_window is 7 in A and 9 in B" in table

    def test_predictions(self, folder: Path) -> None:
        a, b, text = folder / "a.mem", folder / "b.mem", folder / "text.txt"
        found = record("diff", a, b, "--model", folder / "model", "--text", text)["predictions"]
        model = load_model(folder / "model")
        first, second = (open_memory(path, model) for path in (a, b))
        wanted = compare_predictions(model, first, second, [list(TEXT.encode())])
        assert found["tokens"] == len(TEXT) and found["mean_kl"] > 0
        assert found["mean_kl"] == pytest.approx(wanted.mean_kl, rel=1e-6)
        assert found["loss_change"] == pytest.approx(wanted.loss_change, rel=1e-6)

    def test_a_text_needs_a_model(self, folder: Path) -> None:
        told = refusal("diff", folder / "a.mem", folder / "b.mem", "--text", folder / "text.txt")
        assert "--model and --text; give both or neither" in told


class TestFork:
    def test_a_copy(self, folder: Path, tmp_path: Path) -> None:
        found = record("fork", folder / "a.mem", tmp_path / "c.mem")
        assert found["tokens"] == 36
        assert (tmp_path / "c.mem").read_bytes() == (folder / "a.mem").read_bytes()

    def test_what_is_there_stays_unless_forced(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "c.mem").write_text("precious")
        told = refusal("fork", folder / "a.mem", tmp_path / "c.mem")
        assert "exists already; choose another name, or pass --force" in told
        assert (tmp_path / "c.mem").read_text() == "precious"
        assert atlas("fork", folder / "a.mem", tmp_path / "c.mem", "--force").exit_code == 0
        assert read_header(tmp_path / "c.mem").tokens == 36

    def test_no_folder(self, folder: Path, tmp_path: Path) -> None:
        told = refusal("fork", folder / "a.mem", tmp_path / "none" / "c.mem")
        assert "c.mem: could not save" in told and "make it first" in told


class TestQuantize:
    @pytest.mark.parametrize("bits", [8, 4])
    def test_what_it_reports(self, folder: Path, tmp_path: Path, bits: int) -> None:
        file, out = folder / "a.mem", tmp_path / "c.mem"
        options = ("--bits", bits, "--text", folder / "text.txt")
        found = record("quantize", folder / "model", file, out, *options)
        assert (found["bytes_before"], found["bytes"]) == (file.stat().st_size, out.stat().st_size)
        model = load_model(folder / "model")
        full, small = open_memory(file, model), open_memory(out, model)
        wanted = compare_predictions(model, full, small, [list(TEXT.encode())])
        assert found["predictions"]["max_kl"] == pytest.approx(wanted.max_kl, rel=1e-6)
        assert found["predictions"]["same_top1"] == wanted.same_top1
        assert found["largest_error"] == max(
            one.error for one in read_header(out).quantized.values()
        )
        leaves = quantize(full, bits).state.leaves()
        assert all(torch.equal(leaf, leaves[n]) for n, leaf in small.state.leaves().items())

    def test_as_tables(self, folder: Path, tmp_path: Path) -> None:
        options = (folder / "model", folder / "a.mem", tmp_path / "c.mem")
        told = atlas("quantize", *options, "--text", folder / "text.txt").stdout
        assert "KL of the next token, mean (nats)" in told and "bytes before" in told
        assert "already" in refusal("quantize", *options)
        told = atlas("quantize", *options, "--force").stdout
        assert "KL" not in told

    def test_refusals_write_nothing(self, folder: Path, tmp_path: Path) -> None:
        model, file, out = folder / "model", folder / "a.mem", tmp_path / "c.mem"
        assert "bits is 5, wanted 8 or 4" in refusal("quantize", model, file, out, "--bits", 5)
        (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
        told = refusal("quantize", model, file, out, "--text", tmp_path / "bad.txt")
        assert "are no utf-8" in told
        (tmp_path / "short.txt").write_text("a")
        told = refusal("quantize", model, file, out, "--text", tmp_path / "short.txt")
        assert "the text has 1 tokens" in told
        assert not out.exists()


class TestModels:
    """Folders that hold no model, or not ours, are named as such."""

    def test_nothing_there(self, folder: Path, tmp_path: Path) -> None:
        told = refusal("show", folder / "a.mem", "--model", tmp_path / "none")
        assert "none is missing, wanted a folder" in told
        assert "has no config.json" in refusal("show", folder / "a.mem", "--model", tmp_path)
        told = refusal("show", folder / "a.mem", "--model", folder / "text.txt")
        assert "text.txt is a file, wanted a folder" in told

    def test_another_kind_of_model(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        told = refusal("show", folder / "a.mem", "--model", tmp_path)
        assert "a model of type 'llama', wanted 'atlas'" in told

    def test_weights_are_missing(self, folder: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        source = folder / "model"
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        told = refusal("show", folder / "a.mem", "--model", tmp_path)
        assert "cannot be loaded" in told
        weights = load_file(source / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        told = refusal("show", folder / "a.mem", "--model", tmp_path)
        assert "'missing_keys': ['model.norm.weight']" in told

    def test_of_another_memory(self, folder: Path, tmp_path: Path) -> None:
        small_model("mag", "titans", seed=3, vocab_size=259).save_pretrained(tmp_path)
        told = refusal("show", folder / "a.mem", "--model", tmp_path)
        assert "same configuration with other weights" in told

    def test_loading_keeps_weights_tied_and_aligned(self, folder: Path) -> None:
        model = load_model(folder / "model")
        assert model.lm_head.weight is model.model.embed_tokens.weight and not model.training
        assert all(weight.data_ptr() % 64 == 0 for weight in model.parameters())
