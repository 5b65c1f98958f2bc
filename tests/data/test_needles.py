"""Needles, chains of variables and attacks: what is told, where it stands, and what is right."""

import hashlib
import re

import pytest

from atlas_lm.data.asked import Asked
from atlas_lm.data.gpt2 import gpt2_tokenizer
from atlas_lm.data.library import Library
from atlas_lm.data.needles import ANSWER_TOKENS, KINDS, hide_needles, share_told
from atlas_lm.data.poison import ATTACKS, FACTS, STYLES, poison
from atlas_lm.data.variables import ANSWER_TOKENS as CHAIN_TOKENS
from atlas_lm.data.variables import hide_chain

SMALL = Library(small=True)
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for ([\w-]+) is: ([\w-]+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def needles(kind: str, length: int, index: int) -> Asked:
    return hide_needles(kind, length, SMALL, 0, index)


def read_needles(asked: Asked) -> dict[str, list[str]]:
    """Of every key what the text says of it, found by reading."""
    told: dict[str, list[str]] = {}
    for _, key, value in NEEDLE.findall(asked.prompt.text()):
        told.setdefault(key, []).append(value)
    return told


def asked_for(asked: Asked) -> list[str]:
    query = re.search(r"for (.*) mentioned in the provided text\?", asked.prompt.text())
    assert query is not None
    return re.split(r", and |, ", query[1])


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_what_the_text_says(kind: str, length: int) -> None:
    for index in range(3):
        asked = needles(kind, length, index)
        told, wanted = read_needles(asked), asked_for(asked)
        assert len(wanted) == KINDS[kind].queries
        assert asked.targets == tuple(v for key in wanted for v in told[key]) or (
            KINDS[kind].values > 1 and set(asked.targets) == {v for k in wanted for v in told[k]}
        )
        assert len(asked.targets) == KINDS[kind].queries * KINDS[kind].values
        if KINDS[kind].haystack != "needles":
            assert len(told) == KINDS[kind].keys


@pytest.mark.parametrize("length", [1024, 4096, 65536])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_has_its_length(kind: str, length: int) -> None:
    asked = needles(kind, length, 7)
    text = asked.prompt.text() + asked.lead
    tokens = len(gpt2_tokenizer().encode(text))
    assert tokens + ANSWER_TOKENS <= length
    assert tokens + ANSWER_TOKENS > length - 340  # at most a long sentence short of it
    assert asked.prompt.tokens == len(gpt2_tokenizer().encode(asked.prompt.text()))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.keys > 1])
def test_keys_differ(kind: str) -> None:
    """Word pairs are few enough that two draws in some thousands meet."""
    for index in range(600):
        asked = needles(kind, 1024, index)
        wanted = KINDS[kind]
        assert len(set(read_needles(asked))) == wanted.keys
        assert len(set(asked.targets)) == wanted.queries * wanted.values


def test_kinds_of_values_and_haystacks() -> None:
    assert UUID.fullmatch(needles("single_3", 2048, 0).targets[0])
    assert re.fullmatch(r"\d{7}", needles("single_2", 2048, 0).targets[0])
    assert needles("single_1", 2048, 0).prompt.text().count("The grass is green.") > 50
    many = read_needles(needles("multikey_2", 4096, 0))
    assert len(many) > 100  # nearly every line is one
    assert all(UUID.fullmatch(key) for key in read_needles(needles("multikey_3", 4096, 0)))


@pytest.mark.parametrize("kind", ["multikey_2", "multikey_3"])
def test_what_is_asked_for_is_told_once_among_many(kind: str) -> None:
    for index in range(20):
        asked = needles(kind, 4096, index)
        assert read_needles(asked)[asked_for(asked)[0]] == list(asked.targets)


def test_needles_stand_at_all_depths() -> None:
    depths = []
    for index in range(60):
        text = needles("single_2", 4096, index).prompt.text()
        found = NEEDLE.search(text)
        assert found is not None
        depths.append(found.start() / len(text))
    assert min(depths) < 0.12 and max(depths) > 0.85 and 0.38 < sum(depths) / 60 < 0.62


def test_singular_and_plural() -> None:
    one, many = needles("single_1", 2048, 1), needles("multivalue", 2048, 1)
    assert one.prompt.text().startswith("A special magic number is hidden")
    assert one.lead.endswith("mentioned in the provided text is")
    assert many.prompt.text().startswith("Some special magic numbers are hidden")
    assert many.lead.endswith("mentioned in the provided text are")


def test_shares_of_what_was_told() -> None:
    assert share_told(("a1", "b2"), "It is B2.") == 0.5
    assert share_told(("a1",), "nothing") == 0.0


@pytest.mark.parametrize("length", [1024, 30_000])
def test_a_chain_leads_to_its_value(length: int) -> None:
    for index in range(5):
        asked = hide_chain(length, 0, index)
        text = asked.prompt.text()
        value = re.findall(r"assigned the value (\d+) in the text", text)[-1]
        _, _, task = text.rpartition("Memorize and track")
        names = re.findall(rf"VAR (\w+) = {value}\b", task)
        while link := re.search(rf"VAR (\w+) = VAR {names[-1]}\b", task):
            names.append(link[1])
        assert tuple(names) == asked.targets and len(names) == 5
        tokens = len(gpt2_tokenizer().encode(text + asked.lead))
        assert length - 60 < tokens + CHAIN_TOKENS <= length


def test_what_is_too_short_or_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="take a longer"):
        hide_chain(300, 0, 0)
    with pytest.raises(ValueError, match="take a longer"):
        needles("single_1", 200, 0)
    with pytest.raises(ValueError, match="4 needles and their question leave 0 tokens"):
        needles("multiquery", 200, 0)
    with pytest.raises(ValueError, match="1 needles and their question leave 0 tokens"):
        needles("multikey_2", 200, 0)
    with pytest.raises(ValueError, match="wanted one of single_1"):
        needles("single_9", 1024, 0)


def test_the_same_name_gives_the_same_bytes() -> None:
    digest = hashlib.sha256()
    for kind in KINDS:
        asked = needles(kind, 2048, 3)
        digest.update((asked.prompt.text() + asked.lead + str(asked.targets)).encode())
    asked = hide_chain(2048, 0, 3)
    digest.update((asked.prompt.text() + asked.lead + str(asked.targets)).encode())
    for style in STYLES:
        for attack in ATTACKS:
            asked = poison(attack, 5, style, 0, 3)
            digest.update((asked.prompt.text() + asked.lead + str(asked.targets)).encode())
    assert digest.hexdigest()[:16] == "544fc96b10f5169f"


def read_facts(style: str, text: str) -> list[tuple[str, str]]:
    """Keys and values in the order in which they are told, found by reading."""
    pattern = r"(\w)=(\d) " if style == "letters" else r"The code of (\w+ \w+) is (\d{4})\."
    return re.findall(pattern, text)


def question_of(style: str, text: str) -> str:
    pattern = r"(\w)\?$" if style == "letters" else r"What is the code of (\w+ \w+)\?"
    found = re.search(pattern, text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_leave_the_fact_that_is_asked_for_alone(style: str, attack: str) -> None:
    for index in range(10):
        asked = poison(attack, 30, style, 0, index)
        text = asked.prompt.text()
        facts, key = read_facts(style, text), question_of(style, text)
        told = [value for name, value in facts if name == key]
        if attack == "correction":
            assert told[1:] == [asked.targets[0]] * 30 and told[0] != asked.targets[0]
        else:
            assert told == [asked.targets[0]]
        assert len({name for name, _ in facts[:FACTS]}) == FACTS
        assert len(facts) - FACTS == (0 if attack == "noise" else 30)


@pytest.mark.parametrize("style", STYLES)
def test_attacks_are_what_they_say(style: str) -> None:
    calm = poison("noise", 0, style, 0, 1).prompt.text()
    first = read_facts(style, calm)
    again = read_facts(style, poison("repetition", 9, style, 0, 1).prompt.text())[FACTS:]
    assert len(set(again)) == 1 and again[0] in first
    false = read_facts(style, poison("contradiction", 40, style, 0, 1).prompt.text())[FACTS:]
    assert all(dict(first)[key] != value for key, value in false)
    assert 1 < len({key for key, _ in false}) <= FACTS // 2
    near = read_facts(style, poison("near_keys", 40, style, 0, 1).prompt.text())[FACTS:]
    assert not {key for key, _ in near} & {key for key, _ in first}
    assert len(poison("noise", 50, style, 0, 1).prompt.text()) > len(calm) + 100


@pytest.mark.parametrize("style", STYLES)
def test_facts_and_question_do_not_depend_on_the_attack(style: str) -> None:
    texts = [
        poison(attack, strength, style, 0, 2).prompt.text()
        for attack in ATTACKS
        for strength in (0, 7)
    ]
    assert len({tuple(read_facts(style, text)[:FACTS]) for text in texts}) == 1
    assert len({question_of(style, text) for text in texts}) == 1


def test_unknown_attacks_are_refused() -> None:
    for attack, style, strength in (
        ("fire", "letters", 1),
        ("noise", "odes", 1),
        ("noise", "letters", -1),
    ):
        with pytest.raises(ValueError, match="wanted an attack of noise"):
            poison(attack, strength, style, 0)
