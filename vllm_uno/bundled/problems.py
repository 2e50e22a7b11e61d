"""Worked grade-school word problems, drawn from a seed: the text of the bundled model.

A problem's *content* (names, things, events, numbers) is drawn first. The question and the answer
are then written from it by a *writer*: plain code that asks for one choice after the other (which
wording, which of the events next, a remark or none) just before it writes what the choice decides.
The writer's choices are the only source of chance, so the law of the answer given a question is
known exactly, and so is the law of what follows a given beginning: see `continuations`.

    python -m vllm_uno.bundled.problems --split test --count 500 --out test.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

Split = Literal["train", "test"]
Wording = Literal["varied", "fixed"]

LARGEST = 199  # of all numbers in a problem and its answer
LARGEST_PRODUCT = 150
TEST_ONE_IN = 32


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str  # the worked solution; its last sentence states the final answer
    final: int


class Event(NamedTuple):
    """One thing that happens. The total changes by `times * each`, or is divided by `times`."""

    kind: Literal["gain", "loss", "bags", "friends", "share"]
    verb: str  # "buys"; for a share the whole clause
    times: int
    each: int
    place: str  # what the bags are called, or who gets them; may be empty


@dataclass(frozen=True)
class Content:
    """What a problem says, before it is put into words."""

    name: str
    pronoun: str
    things: str
    start: int
    events: tuple[Event, ...]
    distractor: tuple[str, str, int] | None  # kind, another person, number

    @property
    def final(self) -> int:
        total = self.start
        for event in self.events:
            total = _after(total, event)
        return total

    @property
    def split(self) -> Split:
        """Decided by the content alone: other words for the same problem fall on the same side."""
        return "train" if zlib.crc32(repr(self).encode()) % TEST_ONE_IN else "test"


class Choice:
    """Options with their probabilities. Option 0 is the one of the fixed wording."""

    __slots__ = ("bounds", "options", "weights")

    def __init__(self, *weighted: tuple[float, str]) -> None:
        total = sum(weight for weight, _ in weighted)
        self.weights = [weight / total for weight, _ in weighted]
        self.bounds = list(accumulate(self.weights))[:-1]
        self.options = [option for _, option in weighted]


Pick = Callable[[Choice], int]


def _words(*lines: str) -> list[str]:
    return " ".join(lines).split()


_WOMEN = _words(
    "Mia Anna Lena Sara Emma Nora Ruth Ida Zoe Eva Lucy Jane Clara Grace Helen Julia Kate Laura",
    "Maria Olga Paula Rosa Sofia Wendy Alice Bella Diana Fatima Hannah Ingrid",
)
_MEN = _words(
    "Tom Ben Paul Leo Max Sam Jack Omar Finn Hugo Carl Ali Adam David Felix George Henry Ivan",
    "James Kevin Lucas Martin Peter Victor Arthur Boris Dennis Edgar Philip Simon",
)
_PEOPLE = [(name, "she") for name in _WOMEN] + [(name, "he") for name in _MEN]
_THINGS = _words(
    "marbles apples stickers pencils cards coins shells books stamps beads cookies balloons",
    "buttons flowers plums eggs stones candles crayons tickets oranges bananas cherries muffins",
    "pears lemons peaches carrots tomatoes potatoes ribbons erasers markers brushes puzzles dolls",
    "robots kites badges medals magnets postcards photos letters envelopes notebooks feathers",
    "acorns leaves seeds roses tulips bricks blocks nails screws ropes keys spoons cups plates",
    "grapes walnuts peanuts pumpkins turnips biscuits pretzels waffles lanterns whistles trumpets",
    "paintings pictures bracelets necklaces earrings diamonds pebbles sandwiches dumplings",
    "chestnuts blueberries strawberries cucumbers radishes vegetables hammers umbrellas",
    "hazelnuts raspberries pineapples mushrooms dominoes snowballs lollipops crackers",
)
_BAGS = ["bags", "boxes", "packs", "baskets", "jars", "crates", "trays", "bowls"]
_GAINS = ["buys", "finds", "gets", "wins", "collects", "receives", "earns"]
_LOSSES = ["loses", "sells", "drops", "breaks", "trades away"]

# --- The question ---------------------------------------------------------------------------------

_Q_START = Choice(
    (6, "{N} has {start} {things}."),
    (2, "{N} starts with {start} {things}."),
    (1, "At first {N} has {start} {things}."),
)
_Q_LINK = Choice(
    (10, ""),
    (5, "Then "),
    (2, "Later "),
    (2, "After that "),
    (1, "On Monday "),
    (1, "In the morning "),
    (1, "In the evening "),
    (1, "At school "),
    (1, "At the market "),
    (1, "The next day "),
)
_Q_EVENT = {
    "gain": Choice((3, "{verb} {each} more {things}"), (1, "{verb} {each} {things}")),
    "loss": Choice((3, "{verb} {each} {things}{place}"), (1, "{verb} {each} of them{place}")),
    "bags": Choice(
        (3, "{verb} {times} {place} of {each} {things}"),
        (1, "{verb} {times} {place} with {each} {things} each"),
    ),
    "friends": Choice(
        (3, "gives each of {times} friends {each} {things}"),
        (1, "gives {each} {things} to each of {times} friends"),
    ),
    "share": Choice((1, "{verb}")),
}
_Q_DISTRACTOR = {
    "other": Choice((3, "{other} has {number} {things}."), (1, "{other} owns {number} {things}.")),
    "age": Choice((1, "{N} is {number} years old.")),
    "price": Choice((1, "{N} has {number} dollars."), (1, "{N} pays {number} dollars.")),
    "way": Choice((1, "{N} walks {number} miles."), (1, "The shop is {number} miles away.")),
}
_Q_END = Choice(
    (6, "How many {things} does {N} have now?"),
    (2, "How many {things} does {N} have in the end?"),
    (1, "How many {things} are left now?"),
)

# --- The answer -----------------------------------------------------------------------------------

_START = Choice(
    (45, "{N} starts with {start} {things}."),
    (20, "{N} has {start} {things} at first."),
    (20, "At first {N} has {start} {things}."),
    (15, "We start with {start} {things}."),
)
_DISTRACTOR_UNIT = {
    "other": "{things} of {other}",
    "age": "years",
    "price": "dollars",
    "way": "miles",
}
_IGNORE = Choice(
    (70, ""),
    (20, " We do not need the {number} {what}."),
    (10, " The {number} {what} do not count."),
)
_EARLY = Choice((85, "on the way"), (15, "before all steps"))
_PRODUCT = {
    "bags": Choice(
        (75, " The {times} {place} hold {times} * {each} = {change} {things}."),
        (25, " {times} {place} of {each} make {times} * {each} = {change}."),
    ),
    "friends": Choice(
        (75, " The {times} friends get {times} * {each} = {change} {things}."),
        (25, " {times} friends with {each} each make {times} * {each} = {change}."),
    ),
}
_ORDER = [Choice((1, ""))] + [
    Choice((70, ""), *((30 / others, "") for _ in range(others))) for others in range(1, 8)
]
_LINK = Choice((45, " Then {p}"), (27, " {P}"), (14, " Next, {p}"), (14, " After that, {p}"))
_FIRST_LINK = Choice((75, " {P}"), (25, " First, {p}"))
_CLAUSE = {
    "gain": Choice((70, " {verb} {each} more"), (30, " {verb} {each} {things}")),
    "loss": Choice((70, " {verb} {each}{place}"), (30, " {verb} {each} {things}{place}")),
    "bags": Choice(
        (60, " {verb} {times} {place} of {each}, which is"),
        (20, " {verb} {times} {place} of {each} {things}, so"),
        (20, " {verb} {times} {place} with"),
    ),
    "friends": Choice(
        (60, " gives {each} to each of {times} friends, which is"),
        (20, " gives {each} {things} to each of {times} friends, so"),
        (20, " gives {times} friends"),
    ),
    "share": Choice((1, " {verb}")),
}
_TIMES = Choice((75, " {times} * {each} = {change}"), (25, " {each} * {times} = {change}"))
_TIMES_UNIT = Choice((70, ""), (30, " {things}"))
_KNOWN_CLAUSE = {
    "bags": Choice(
        (70, " {verb} the {change} in {place}"), (30, " {verb} these {change} {things}")
    ),
    "friends": Choice(
        (70, " gives the {change} to the friends"), (30, " gives these {change} {things} away")
    ),
}
_RESULT = Choice(
    (40, ", so {p} has"),
    (20, ", so {p} now has"),
    (18, ":"),
    (12, ". That makes"),
    (10, ", and now {p} has"),
)
_SUM = Choice((75, "total first"), (25, "change first"))
_OPERAND_UNIT = Choice((80, ""), (20, " {things}"))
_UNIT = Choice((60, "."), (30, " {things}."), (10, " {things} now."))
_REMARK = Choice((82, ""), (11, " Now {p} has {total} {things}."), (7, " That is {total} so far."))
_END = Choice(
    (65, ""),
    (25, " So {N} has {total} {things} now."),
    (10, " {N} has {total} {things} in the end."),
)
_FINAL = Choice((80, " The answer is {total}."), (20, " So the answer is {total}."))


def _after(total: int, event: Event) -> int:
    if event.kind == "share":
        return total // event.times
    change = event.times * event.each
    return total + change if event.kind in ("gain", "bags") else total - change


def _draw_event(rng: random.Random, total: int, room: int, name: str) -> Event | None:
    """An event that fits a total, with `room` left for gains; None if the kind drawn does not."""
    kind = rng.random()
    if kind < 0.32 and room > 2:
        return Event("gain", rng.choice(_GAINS), 1, rng.randint(2, min(40, room)), "")
    if kind < 0.60 and total > 3:
        each = rng.randint(2, min(40, total - 1))
        if rng.random() < 0.5:
            return Event("loss", rng.choice(_LOSSES), 1, each, "")
        return Event("loss", "gives", 1, each, f" to {_other(rng, name)}")
    if kind < 0.78:
        times, each = rng.randint(2, 6), rng.randint(2, 12)
        if times * each <= room:
            return Event("bags", rng.choice(("buys", "gets")), times, each, rng.choice(_BAGS))
    elif kind < 0.92:
        times, each = rng.randint(2, 6), rng.randint(2, 8)
        if times * each < total:
            return Event("friends", "gives", times, each, "")
    elif kind < 0.96:
        times = rng.randint(3, 5)
        if total % times == 0 and 2 <= total // times <= 20:
            return Event("share", f"makes {times} equal piles and keeps one", times, 0, "")
    elif total % 2 == 0 and 2 <= total // 2 <= 20:
        return Event("share", f"gives half to {_other(rng, name)}", 2, 0, "")
    return None


def _other(rng: random.Random, name: str) -> str:
    while True:
        other = rng.choice(_PEOPLE)[0]
        if other != name:
            return other


def _draw_content(rng: random.Random) -> Content:
    name, pronoun = rng.choice(_PEOPLE)
    start = total = rng.randint(3, 60)
    # The gains up to the next share may all be put before the losses: even then the total must
    # stay in range, whatever order an answer takes.
    room = LARGEST - start
    events: list[Event] = []
    count = rng.choice((2, 2, 3, 3, 3, 4))
    while len(events) < count:
        event = _draw_event(rng, total, room, name)
        if event is None:
            continue
        total = _after(total, event)
        if event.kind == "share":
            room = LARGEST - total
        elif event.kind in ("gain", "bags"):
            room -= event.times * event.each
        events.append(event)
    distractor = None
    if rng.random() < 0.3:
        kind = rng.choice(("other", "other", "age", "price", "way"))
        number = rng.randint(5, 15) if kind == "age" else rng.randint(2, 60)
        distractor = (kind, _other(rng, name) if kind == "other" else "", number)
    return Content(name, pronoun, rng.choice(_THINGS), start, tuple(events), distractor)


def contents(split: Split, count: int, seed: int = 0) -> Iterator[Content]:
    """`count` contents of one split; those of the test split are all different."""
    rng = random.Random(f"{split} {seed}")
    seen: set[Content] = set()
    while count:
        content = _draw_content(rng)
        if content.split != split or content in seen:
            continue
        if split == "test":
            seen.add(content)
        count -= 1
        yield content


def _fields(content: Content) -> dict[str, object]:
    return {
        "N": content.name,
        "p": content.pronoun,
        "P": content.pronoun.capitalize(),
        "things": content.things,
        "start": content.start,
    }


def _write_question(content: Content, pick: Pick) -> str:
    fields = _fields(content)

    def say(choice: Choice) -> str:
        return choice.options[pick(choice)].format_map(fields)

    sentences = [say(_Q_START)]
    if content.distractor is not None:
        kind, fields["other"], fields["number"] = content.distractor
        sentences.append(say(_Q_DISTRACTOR[kind]))
    for event in content.events:
        fields.update(event._asdict())
        link = say(_Q_LINK)
        subject = content.pronoun if link else content.pronoun.capitalize()
        sentences.append(f"{link}{subject} {say(_Q_EVENT[event.kind])}.")
    sentences.append(say(_Q_END))
    return " ".join(sentences)


def _write_answer(content: Content, pick: Pick, out: list[str]) -> None:
    """Appends the answer to `out` in pieces: before each `pick`, all that is decided by then."""
    fields = _fields(content)

    def say(choice: Choice) -> None:
        out.append(choice.options[pick(choice)].format_map(fields))

    say(_START)
    if content.distractor is not None:
        kind, fields["other"], fields["number"] = content.distractor
        fields["what"] = _DISTRACTOR_UNIT[kind].format_map(fields)
        say(_IGNORE)
    known: set[int] = set()
    for index, event in enumerate(content.events):
        if event.kind in _PRODUCT and pick(_EARLY):
            fields.update(event._asdict(), change=event.times * event.each)
            say(_PRODUCT[event.kind])
            known.add(index)
    total = content.start
    left = list(range(len(content.events)))
    while left:
        open_ones = _lawful(content, left, total)
        index = open_ones[pick(_ORDER[len(open_ones) - 1])] if len(open_ones) > 1 else open_ones[0]
        event = content.events[index]
        after = _after(total, event)
        change = event.times * event.each
        fields.update(event._asdict(), change=change, total=after)
        say(_LINK if len(left) < len(content.events) else _FIRST_LINK)
        if index in known:
            say(_KNOWN_CLAUSE[event.kind])
        else:
            say(_CLAUSE[event.kind])
            if event.kind in _PRODUCT:
                say(_TIMES)
                say(_TIMES_UNIT)
        say(_RESULT)
        swapped = pick(_SUM) if event.kind in ("gain", "bags") else 0
        out.append(f" {change if swapped else total}")
        say(_OPERAND_UNIT)
        if event.kind == "share":
            rest = f" / {event.times}"
        elif event.kind in ("gain", "bags"):
            rest = f" + {total if swapped else change}"
        else:
            rest = f" - {change}"
        out.append(f"{rest} = {after}")
        say(_UNIT)
        left.remove(index)
        total = after
        if left:
            say(_REMARK)
    say(_END)
    say(_FINAL)


def _lawful(content: Content, left: list[int], total: int) -> list[int]:
    """Those of the events left that may come next, in the question's order."""
    lawful: list[int] = []
    for index in left:
        event = content.events[index]
        if event.kind == "share":
            # A share does not commute: what came before it stays before it, and so for after.
            return lawful or [index]
        if _after(total, event) >= 0:
            lawful.append(index)
    return lawful


def _picker(rng: random.Random) -> Pick:
    draw = rng.random
    return lambda choice: bisect(choice.bounds, draw())


def _first(choice: Choice) -> int:
    return 0


def write(content: Content, rng: random.Random, wording: Wording = "varied") -> Problem:
    """Puts a content into words."""
    pick = _picker(rng) if wording == "varied" else _first
    question = _write_question(content, pick)
    out: list[str] = []
    _write_answer(content, pick, out)
    return Problem(question, "".join(out), content.final)


def generate(
    split: Split, count: int, seed: int = 0, wording: Wording = "varied"
) -> Iterator[Problem]:
    """`count` problems of one split. The same seed gives the same contents in both wordings."""
    rng = random.Random(f"words {split} {seed}")
    for content in contents(split, count, seed):
        yield write(content, rng, wording)


class _Ask(Exception):
    """Raised where the writer needs a choice that is not recorded yet."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


def _beginnings(content: Content, prefix: str) -> list[tuple[float, list[int]]]:
    """All lists of choices that just reach the end of `prefix`, with their probabilities.

    The writer runs again from its start for each list; it writes what a choice decides at once, so
    that wrong choices are seen early and few lists are ever open.
    """
    found: list[tuple[float, list[int]]] = []
    todo: list[tuple[float, list[int]]] = [(1.0, [])]
    while todo:
        weight, choices = todo.pop()
        recorded = iter(choices)
        out: list[str] = []

        def pick(choice: Choice, recorded: Iterator[int] = recorded) -> int:
            index = next(recorded, None)
            if index is None:
                raise _Ask(choice)
            return index

        asked: Choice | None = None
        try:
            _write_answer(content, pick, out)
        except _Ask as ask:
            asked = ask.choice
        text = "".join(out)
        if text.startswith(prefix):
            found.append((weight, choices))
        elif asked is not None and prefix.startswith(text):
            todo += [(weight * p, [*choices, i]) for i, p in enumerate(asked.weights)]
    return found


def continuations(content: Content, prefix: str, count: int, seed: int) -> list[str]:
    """`count` answers to one problem that start with the text `prefix`, whole, in the varied words.

    Drawn from the writer's exact law given the prefix: the lists of choices that lead to it are
    counted out with their probabilities, one is drawn, and the writer goes on from there by chance.
    """
    beginnings = _beginnings(content, prefix)
    if not beginnings:
        raise ValueError(f"no answer to this problem starts with {prefix!r}")
    rng = random.Random(f"continuations {seed}")
    weights = [weight for weight, _ in beginnings]
    texts = []
    for _, choices in rng.choices(beginnings, weights, k=count):
        recorded = iter(choices)
        chance = _picker(rng)

        def pick(choice: Choice, recorded: Iterator[int] = recorded, chance: Pick = chance) -> int:
            index = next(recorded, None)
            return chance(choice) if index is None else index

        out: list[str] = []
        _write_answer(content, pick, out)
        texts.append("".join(out))
    return texts


_FINAL_NUMBER = re.compile(r"answer\s*(?:is|:|=)\s*(-?\d+)(?![\d]*\.\d)", re.IGNORECASE)


def extract_final(text: str) -> int | None:
    """The final answer that a model's text states (the last one stated), None if there is none."""
    found = _FINAL_NUMBER.findall(text)
    return int(found[-1]) if found else None


def write_records(
    path: Path, split: Split, count: int, seed: int = 0, wording: Wording = "varied"
) -> None:
    """Write `count` problems as JSON lines: chat `messages`, and the final `answer` as text."""
    with path.open("w", encoding="utf-8") as file:
        for problem in generate(split, count, seed, wording):
            messages = [
                {"role": "user", "content": problem.question},
                {"role": "assistant", "content": problem.answer},
            ]
            record = {"messages": messages, "answer": str(problem.final)}
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes word problems as chat records, one a line."
    )
    parser.add_argument("--split", choices=("train", "test"), default="test")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wording", choices=("varied", "fixed"), default="varied")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file to write")
    args = parser.parse_args()
    write_records(args.out, args.split, args.count, args.seed, args.wording)


if __name__ == "__main__":
    main()
