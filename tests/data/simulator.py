"""Answers bAbI's questions qa1 to qa5 by replaying the text; shares nothing with the maker of stories."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Solution = tuple[
    str, tuple[int, ...]
]  # the answer and the places of the facts from which it follows

FACTS = {
    "move": r"(\w+) (?:journeyed|moved|travelled|went|went back) to the (\w+)\.",
    "take": r"(\w+) (?:got|grabbed|picked up|took) the (\w+)(?: there)?\.",
    "drop": r"(\w+) (?:discarded|dropped|left|put down) the (\w+)(?: there)?\.",
    "give": r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\.",
    "relate": r"The (\w+) is (north|south|east|west) of the (\w+)\.",
}
QUESTIONS = {
    "where_was": r"Where was the (\w+) before the (\w+)\?",
    "where_is": r"Where is(?: the)? (\w+)\?",
    "what_given": r"What did (?P<giver>\w+) give to (?P<receiver>\w+)\?",
    "receiver_of": r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?",
    "receiver": r"Who received the (?P<thing>\w+)\?",
    "giver": r"Who gave the (?P<thing>\w+)(?: to (?P<receiver>\w+))?\?",
    "what_beside": r"What is (north|south|east|west) of the (\w+)\?",
    "what_reached": r"What is the (\w+) (north|south|east|west) of\?",
}
TURNED = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass
class Spot:
    """A place where someone or something is, and the fact that told so."""

    place: str
    fact: int


@dataclass
class Replay:
    """What is known after some facts; a fact that cannot be raises a ValueError."""

    spots: dict[str, Spot] = field(default_factory=dict)  # of people
    holders: dict[str, str] = field(default_factory=dict)  # object -> person
    trails: dict[str, list[Spot]] = field(default_factory=dict)  # of objects, oldest first
    touched: dict[str, int] = field(default_factory=dict)  # object -> its last taking or dropping
    gifts: list[dict[str, str | int]] = field(default_factory=list)
    relations: list[tuple[str, str, str, int]] = field(default_factory=list)

    def move(self, fact: int, person: str, place: str) -> None:
        if person in self.spots and self.spots[person].place == place:
            raise ValueError(f"{person} moves to the {place}, but is there")
        self.spots[person] = Spot(place, fact)
        for thing, holder in self.holders.items():
            if holder == person:
                self.trails[thing].append(self.spots[person])

    def take(self, fact: int, person: str, thing: str) -> None:
        if thing in self.holders:
            raise ValueError(f"{person} takes the {thing}, but {self.holders[thing]} has it")
        self.holders[thing], self.touched[thing] = person, fact
        trail, spot = self.trails.setdefault(thing, []), self.spots.get(person)
        if spot is None:
            return
        if trail and trail[-1].place != spot.place:
            raise ValueError(f"{person} takes the {thing}, but it is in the {trail[-1].place}")
        self.trails[thing] = [*trail[:-1], spot]

    def drop(self, fact: int, person: str, thing: str) -> None:
        self.check_holder(person, thing)
        del self.holders[thing]
        self.touched[thing] = fact

    def give(self, fact: int, giver: str, thing: str, receiver: str) -> None:
        self.check_holder(giver, thing)
        places = {self.spots[person].place for person in (giver, receiver) if person in self.spots}
        if giver == receiver or len(places) > 1:
            raise ValueError(f"{giver} cannot give the {thing} to {receiver}")
        self.holders[thing] = receiver
        self.gifts.append(dict(giver=giver, thing=thing, receiver=receiver, fact=fact))

    def relate(self, fact: int, one: str, side: str, other: str) -> None:
        self.relations += [(one, side, other, fact), (other, TURNED[side], one, fact)]

    def check_holder(self, person: str, thing: str) -> None:
        if self.holders.get(thing) != person:
            raise ValueError(f"{person} does not have the {thing}")

    def where_is(self, name: str) -> Solution:
        if name in self.spots:
            return self.spots[name].place, (self.spots[name].fact,)
        spot = self.trails[name][-1]
        return spot.place, (self.touched[name], spot.fact)

    def where_was(self, thing: str, place: str) -> Solution:
        trail = self.trails[thing]
        last = max(i for i, spot in enumerate(trail) if spot.place == place)
        if last == 0:
            raise ValueError(f"it was never told where the {thing} was before the {place}")
        return trail[last - 1].place, (self.touched[thing], trail[last].fact, trail[last - 1].fact)

    def gift(self, part: str, **known: str | None) -> Solution:
        """The asked part of the last gift of which the known parts are true."""
        wanted = {name: value for name, value in known.items() if value is not None}
        fitting = [gift for gift in self.gifts if wanted.items() <= gift.items()]
        return str(fitting[-1][part]), (int(fitting[-1]["fact"]),)

    def beside(self, side: str, place: str) -> Solution:
        [(answer, fact)] = [(a, i) for a, s, b, i in self.relations if (s, b) == (side, place)]
        return answer, (fact,)


def replay(facts: Sequence[str]) -> Replay:
    """What is known after the facts."""
    world = Replay()
    for i, fact in enumerate(facts):
        name, match = understand(fact, FACTS)
        getattr(world, name)(i, *match.groups())
    return world


def solve(facts: Sequence[str], question: str) -> Solution:
    """The answer that follows from the facts; where several do, from the latest."""
    world = replay(facts)
    name, match = understand(question, QUESTIONS)
    ways: dict[str, Callable[[], Solution]] = {
        "where_was": lambda: world.where_was(*match.groups()),
        "where_is": lambda: world.where_is(*match.groups()),
        "what_given": lambda: world.gift("thing", **match.groupdict()),
        "receiver_of": lambda: world.gift("receiver", **match.groupdict()),
        "receiver": lambda: world.gift("receiver", **match.groupdict()),
        "giver": lambda: world.gift("giver", **match.groupdict()),
        "what_beside": lambda: world.beside(*match.groups()),
        "what_reached": lambda: world.beside(TURNED[match[2]], match[1]),
    }
    return ways[name]()


def understand(sentence: str, patterns: dict[str, str]) -> tuple[str, re.Match[str]]:
    for name, pattern in patterns.items():
        if match := re.fullmatch(pattern, sentence):
            return name, match
    raise ValueError(f"cannot understand {sentence!r}")
