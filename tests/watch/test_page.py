"""The page holds the record that it shows, and nothing that a text could smuggle in."""

import base64
import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from atlas_lm.models.modeling import AtlasForCausalLM
from atlas_lm.models.sizes import configure
from atlas_lm.text import ByteTokenizer
from atlas_lm.watch import About, Cell, LayerRecord, Record, build_page, observe, to_cells
from atlas_lm.watch.page import pack

HOSTILE = (
    "</script><script>alert(1)</script><!-- ]]> & \" ' ` ${x}\\u003c \x00\x1b\x7f \u202eright\u2028line"
    " <img src=x onerror=alert(2)> é 漢 \U0001f469\u200d\U0001f467 e\u0301\r\n\tend\n"
)
BYTES = ByteTokenizer()


def build(preset: str = "titans", **options) -> AtlasForCausalLM:
    torch.manual_seed(0)
    return AtlasForCausalLM(configure(preset, **options)).eval()


def page_of(
    text: str, model: AtlasForCausalLM, about: str = "plain"
) -> tuple[str, Record, list[Cell]]:
    record = observe(model, torch.tensor(BYTES.encode(text)))
    cells = to_cells(BYTES, record.ids.tolist())
    told = About(model=about, text=about, facts={about: about}, note=about)
    return build_page(record, cells, model.config.spec, told), record, cells


class Scripts(HTMLParser):
    """The tags of a page, and the text of its data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.data: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.data[self.inside] = self.data.get(self.inside, "") + data


def parse(page: str) -> tuple[list[str], dict]:
    parser = Scripts()
    parser.feed(page)
    return parser.tags, json.loads(parser.data["data"])


def numbers(text: str, kind: str = "<u2") -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype=kind).tolist()


def unpacked(packed: dict) -> torch.Tensor:
    """As the page reads it."""

    def value(code: int) -> float:
        if code in (0, 65535):
            return math.nan if code else 0.0
        return math.exp(packed["low"] + (code - 1) * packed["step"])

    return torch.tensor([value(code) for code in numbers(packed["codes"])])


def test_the_page_holds_the_record():
    page, record, cells = page_of("Ein Gespräch.\n" * 8, build(block=["mag", "sliding"]))
    _, data = parse(page)
    assert numbers(data["ids"]) == record.ids.tolist()
    assert numbers(data["counts"]) == [cell.tokens for cell in cells]
    assert data["tokens"] == sum(numbers(data["counts"])) == len(record.ids)
    near = dict(rtol=1e-3, atol=0, equal_nan=True)
    torch.testing.assert_close(unpacked(data["loss"]), record.loss, **near)
    assert [one["wiring"] for one in data["layers"]] == ["mag", "sliding"]
    assert data["layers"][1]["seen"] == {}
    seen = data["layers"][0]["seen"]
    assert seen.keys() == record.layers[0].seen.keys()
    for name, values in record.layers[0].seen.items():
        values = 1 - values if name == "retention" else values
        torch.testing.assert_close(unpacked(seen[name]), values, **near)
    names = [one["name"] for one in data["quantities"]]
    assert names == ["surprise", "write", "retention", "memory", "momentum", "loss"]


def test_the_text_is_cut_at_characters():
    page, _, cells = page_of(HOSTILE, build())
    _, data = parse(page)
    units = data["text"].encode("utf-16-le")
    ends = np.cumsum([0, *numbers(data["lengths"])]) * 2
    shown = [units[a:b].decode("utf-16-le") for a, b in itertools.pairwise(ends)]
    assert shown == [cell.text for cell in cells]
    assert "漢" in shown and "e\u0301" in shown and "\U0001f469\u200d\U0001f467" in shown


def test_hostile_text_stays_text():
    safe_tags, _ = parse(page_of("plain", build())[0])
    page, _, cells = page_of(HOSTILE, build(), HOSTILE)
    tags, data = parse(page)
    assert tags == safe_tags
    assert data["note"] == data["model"] == data["facts"][data["note"]]
    assert data["note"].startswith("</script><script>alert(1)</script><!-- ]]> & \" ' ` ${x}")
    assert "".join(cell.text for cell in cells) == data["text"]
    for told in (data["text"], data["note"], page):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2028\u2029]", told)


def test_the_page_fetches_nothing():
    page, _, _ = page_of("plain", build())
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?:|//[a-z]+\.""", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("layers", [1, 4])
def test_the_page_is_small(layers):
    """Beside the page itself, at most 40 bytes per token and layer with every quantity there is."""
    model = build(num_hidden_layers=layers)
    short, long = (len(page_of("Lorem ipsum, " * n, model)[0]) for n in (20, 60))
    assert long - short < 40 * layers * 40 * len("Lorem ipsum, ")
    assert short < 60_000 + 40 * layers * 20 * len("Lorem ipsum, ")


def test_packed_numbers_keep_three_digits_over_any_range():
    values = torch.tensor([0.0, 1e-30, 3.14159, 2.5e30, math.nan, math.inf, 1e-7])
    got = unpacked(pack(values))
    close = dict(rtol=1.1e-3, atol=0, equal_nan=True)
    torch.testing.assert_close(got, values.where(values.isfinite(), math.nan), **close)
    torch.testing.assert_close(unpacked(pack(torch.full((3,), 0.25))), torch.full((3,), 0.25))
    assert unpacked(pack(torch.zeros(2))).tolist() == [0.0, 0.0]
    assert unpacked(pack(torch.full((2,), math.nan))).isnan().all()


def test_a_large_vocabulary_needs_wider_ids():
    ids = torch.tensor([5, 70000])
    layer = LayerRecord(wiring="lmm", seen={"surprise": torch.ones(2)})
    record = Record(ids=ids, loss=torch.ones(2), layers=(layer,), start=0)
    spec = configure("titans").spec
    assert spec is not None
    about = About(model="m", text="t", facts={})
    _, data = parse(build_page(record, [Cell("ab", 2)], spec, about))
    assert data["wide"] and numbers(data["ids"], "<u4") == [5, 70000]
    with pytest.raises(ValueError, match="the cells hold 1 tokens, the record 2"):
        build_page(record, [Cell("ab", 1)], spec, about)


def test_the_explanations_fit_the_rule():
    def told(preset: str) -> dict[str, str]:
        _, data = parse(page_of("text", build(preset))[0])
        return {one["name"]: one["means"] for one in data["quantities"]}

    assert "Newton-Schulz" in told("atlas")["write"]
    assert "Momentum carries" in told("titans")["write"]
    assert "toward its learned start" in told("titans")["retention"]
    assert "toward zero" in told("gla")["retention"]
    assert "retention" not in told("dot") and "momentum" not in told("dot")
