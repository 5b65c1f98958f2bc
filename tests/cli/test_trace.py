"""The command, from a folder and a text to a page."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from atlas_lm.cli import trace as command
from atlas_lm.cli.main import app
from atlas_lm.models.modeling import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.stream.files import save_memory
from atlas_lm.stream.reading import Reading
from atlas_lm.watch import observe

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, <b>é</b>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("trace")
    AtlasForCausalLM(configure("titans", block="mag")).save_pretrained(place / "whale")
    AtlasForCausalLM(configure("transformer")).save_pretrained(place / "plain")
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    (place / "empty.txt").write_text("")
    return place


def run(folder, *words: str, text: str | None = None):
    """In the folder's terms: the words that are names of things in it become paths."""
    arguments = [str(folder / w) if (folder / w).exists() else w for w in words]
    return CliRunner().invoke(app, ["trace", *arguments], input=text)


def data_of(page) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found.group(1))


def test_a_page_from_a_model_and_a_text(folder, tmp_path):
    page = tmp_path / "page.html"
    result = run(folder, "whale", "text.txt", "--html", str(page))
    assert result.exit_code == 0, result.output
    assert f"{len(TEXT.encode())} tokens" in result.stdout
    data = data_of(page)
    assert data["model"] == "whale" and data["text_name"] == "text.txt" and data["note"] == ""
    assert data["text"] == TEXT.replace("\n", "↵\n")
    assert data["facts"]["blocks"] == "2 x mag"
    assert data["facts"]["optimizer"] == "momentum"
    assert [one["wiring"] for one in data["layers"]] == ["mag", "mag"]


def test_a_page_is_not_overwritten_by_accident(folder, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("precious")
    result = run(folder, "whale", "text.txt", "--html", str(page))
    assert result.exit_code == 2 and "exists already" in result.stderr
    assert page.read_text() == "precious"
    assert run(folder, "whale", "text.txt", "--html", str(page), "--force").exit_code == 0
    assert data_of(page)["tokens"] == len(TEXT.encode())


def test_the_record_as_json(folder):
    result = run(folder, "whale", "-", "--json", text=TEXT)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    model = AtlasForCausalLM.from_pretrained(folder / "whale").eval()
    wanted = observe(model, torch.tensor(list(TEXT.encode())))
    assert record["ids"] == wanted.ids.tolist()
    got = torch.tensor(record["layers"][1]["surprise"])
    torch.testing.assert_close(got, wanted.layers[1].seen["surprise"], rtol=1e-4, atol=1e-7)


def test_a_long_text_is_refused_until_a_part_is_chosen(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LIMIT", 20)
    page = tmp_path / "page.html"
    result = run(folder, "whale", "text.txt", "--html", str(page))
    assert result.exit_code == 2 and not page.exists()
    assert "more than 20 tokens" in result.stderr
    assert "--skip 20 --tokens 20" in result.stderr
    result = run(folder, "whale", "text.txt", "--html", str(page), "--tokens", "9", "--skip", "5")
    assert result.exit_code == 0, result.output
    data = data_of(page)
    assert data["text"] == TEXT[5:14] and data["first"] == 5
    assert data["note"] == (
        "A part of the text: tokens 5 to 13; the first 5 were left out, more follow."
    )


def test_a_memory_is_continued(folder, tmp_path):
    model = AtlasForCausalLM.from_pretrained(folder / "whale").eval()
    ids = torch.tensor(list(TEXT.encode()))
    with torch.no_grad():
        state = model(ids[None, :32], use_cache=True).past_key_values.state
    reading = Reading(state=state, pending=ids[32:35], stride=32)
    save_memory(tmp_path / "book.mem", model, reading)
    before = (tmp_path / "book.mem").read_bytes()
    options = ["--memory", str(tmp_path / "book.mem")]
    result = run(folder, "whale", "-", "--json", *options, text=TEXT[35:])
    assert result.exit_code == 0, result.output
    record, whole = json.loads(result.stdout), observe(model, ids, stride=32)
    assert record["start"] == 35
    got = torch.tensor(record["loss"])
    torch.testing.assert_close(got, whole.loss[35:], rtol=1e-4, atol=1e-6)
    page = tmp_path / "page.html"
    assert run(folder, "whale", "text.txt", "--html", str(page), *options).exit_code == 0
    assert data_of(page)["note"].startswith("The model had read 35 tokens before, kept in book.mem")
    assert (tmp_path / "book.mem").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["whale", "text.txt"], "pass --html PAGE for a page or --json for a record"),
        (["whale", "text.txt", "--json", "--html", "x.html"], "one of the two"),
        (["whale", "text.txt", "--html", "nowhere/x.html"], "nowhere is no folder"),
        (["whale", "text.txt", "--html", "text.txt"], "is the text itself"),
        (["whale", "text.txt", "--json", "--tokens", "0"], "--tokens is 0"),
        (["whale", "text.txt", "--json", "--skip", "-1"], "--skip -1"),
        (["whale", "text.txt", "--json", "--skip", "999"], "--skip 999 leaves none; skip fewer"),
        (["whale", "empty.txt", "--json"], "has 0 tokens; pass a text"),
        (["whale", "missing.txt", "--json"], "missing.txt"),
        (["nowhere", "text.txt", "--json"], "nowhere is missing"),
        (["plain", "text.txt", "--json"], "no memory to watch"),
        (["whale", "text.txt", "--json", "--memory", "text.txt"], "text.txt"),
    ],
)
def test_refusals(folder, words, complaint):
    result = run(folder, *words)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1
