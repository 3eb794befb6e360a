"""Story number n: who it is about, how it is asked for, and the beats that the teacher is led along.

Everything is drawn from one random generator seeded with (SEED, n), so any process makes the same story n.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from toy_maker import words
from toy_maker.plots import PLOTS, Plot

SEED = 2027
PRONOUNS = {"girl": ("she", "her", "her"), "boy": ("he", "him", "his")}
WRONG = {"she": frozenset({"he", "him", "his", "himself"}), "he": frozenset({"she", "her", "hers", "herself"})}
ASKS = (
    ("Tell me a story about {}.", 10),
    ("Tell me a story about {}", 2),
    ("tell me a story about {}", 1),
    ("Tell me a short story about {}.", 2),
    ("Write a short story about {}.", 2),
    ("Write a story about {}.", 2),
    ("Can you tell me a story about {}?", 2),
    ("Please tell me a story about {}.", 1),
    ("I want to hear a story about {}.", 1),
    ("A story about {}, please.", 1),
)
SHELTERS = ("a small cave", "an old barn", "a hollow tree", "a little hut", "a bridge")
TRAPS = ("in a deep hole", "in a net", "in the mud", "under a fallen branch", "between two rocks", "in a thorny bush")
VASES = ("vase", "cup", "window", "lamp", "plate", "clock", "bowl")
ROADS = ("river", "bridge", "road", "old mill", "market")
VAGUE = ("Tell me a story.", "Tell me a story", "tell me a story", "Can you tell me a story?", "Write a story.")


@dataclass(frozen=True)
class Beat:
    """`text` is as it stands here; `opener` begins the teacher's sentence, which may be left out ("" : none)."""

    text: str
    opener: str


@dataclass(frozen=True)
class Plan:
    number: int
    plot: str
    subject: str  # "a shy fox named Pip who finds a golden key": everything, for the teacher
    ask: str  # what the user of the toy says
    who: str  # "a shy fox"
    name: str
    friend: str
    wrong_words: frozenset[str]  # pronouns of the other gender: with them nobody knows who is meant
    beats: tuple[Beat, ...]

    def allowed_names(self) -> set[str]:
        return {self.name, self.friend}


def with_article(noun: str) -> str:
    """ "fox" -> "a fox", "owl" -> "an owl"; what has an article or is many keeps as it is."""
    if noun.startswith(("a ", "an ", "the ")):
        return noun
    return ("an " if noun[0] in "aeiou" and not noun.startswith(("unicorn", "one")) else "a ") + noun


def draw_plan(number: int) -> Plan:
    """The plan of story `number`."""
    rng = random.Random(f"{SEED}/{number}")
    key = rng.choice(list(PLOTS))
    plot = PLOTS[key]
    fields = _draw_fields(rng)
    tail = _fill(rng.choice(plot.asks), fields)
    subject = f"{fields['a_who']} named {fields['N']} {tail}"
    beats = [_beat(rng.choice(variants), fields) for variants in plot.beats]
    return Plan(
        number=number,
        plot=key,
        subject=subject,
        ask=_ask(rng, plot, fields, tail),
        who=fields["a_who"],
        name=fields["N"],
        friend=fields["F"],
        wrong_words=WRONG[fields["he"]],
        beats=tuple(beat for beat in beats if beat.text),
    )


def _draw_hero(rng: random.Random) -> tuple[str, str, str]:
    """Kind, name and which pronouns."""
    group = rng.choices(("animal", "girl", "boy", "people", "thing"), (42, 14, 14, 10, 20))[0]
    gender = rng.choice(("girl", "boy"))
    if group in ("girl", "boy"):
        kinds = words.GIRLS if group == "girl" else words.BOYS
        kind = kinds[0] if rng.random() < 0.6 else rng.choice(kinds)
        return kind, rng.choice(words.GIRL_NAMES if group == "girl" else words.BOY_NAMES), group
    kind = rng.choice({"animal": words.ANIMALS, "people": words.PEOPLE, "thing": words.THINGS_ALIVE}[group])
    names = words.PET_NAMES if group != "people" and rng.random() < 0.6 else None
    return kind, rng.choice(names or (words.GIRL_NAMES if gender == "girl" else words.BOY_NAMES)), gender


def _draw_fields(rng: random.Random) -> dict[str, str]:
    kind, name, gender = _draw_hero(rng)
    he, him, his = PRONOUNS[gender]
    friend_kind = rng.choice([one for one in words.FRIENDS if one != kind])
    names = words.PET_NAMES + (words.GIRL_NAMES if he == "she" else words.BOY_NAMES)
    friend = rng.choice([one for one in names if one != name])
    thing, place = rng.choice(words.THINGS), rng.choice(words.PLACES)
    who = kind if rng.random() < 0.2 else f"{rng.choice(words.TRAITS)} {kind}"
    fields = {
        "N": name, "F": friend, "kind": kind, "who": who, "a_who": with_article(who), "friend": friend_kind,
        "he": he, "him": him, "his": his, "He": he.title(), "His": his.title(),
        "place": place, "Place": place[0].upper() + place[1:], "spot": rng.choice(words.SPOTS),
        "thing": thing, "thing0": thing.split()[-1], "a_thing": with_article(thing),
    }  # fmt: skip
    lists = {
        "food": words.FOODS, "fear": words.FEARS, "skill": words.SKILLS, "build": words.BUILDS, "gift": words.GIFTS,
        "hobby": words.HOBBIES,
        "seed": words.SEEDS, "giant": [one for one in words.GIANTS if one != kind], "shelter": SHELTERS,
        "trap": TRAPS, "vase": VASES, "road": ROADS,
    }  # fmt: skip
    return fields | {name: rng.choice(values) for name, values in lists.items()}


def _fill(template: str, fields: dict[str, str]) -> str:
    """Fill in, and mend "a owl" to "an owl"."""
    text = template.format(**fields)
    return re.sub(r"\b([Aa]) (?=[aeiou])(?!uni|one)", r"\1n ", text)


def _beat(template: str, fields: dict[str, str]) -> Beat:
    text, _, opener = _fill(template, fields).partition("~")
    return Beat(text.strip(), opener.strip())


def _ask(rng: random.Random, plot: Plot, fields: dict[str, str], tail: str) -> str:
    """Long, short, or by its topic, as people ask."""
    name = f" named {fields['N']}" if rng.random() < 0.25 else ""
    kind = with_article(fields["kind"])
    who = fields["a_who"] if rng.random() < 0.7 else kind
    form = rng.random()
    if form < 0.02:
        return rng.choice(VAGUE)
    if form < 0.52:
        about = f"{who}{name} {tail}"
    elif form < 0.82:
        about = f"{who}{name}" if rng.random() < 0.6 else kind
    elif form < 0.88:
        about = f"{kind} and {with_article(fields['friend'])}"
    elif form < 0.90:
        about = f"{fields['N']} and {fields['F']}"
    elif form < 0.93:
        about = re.sub(r"^.*?\b(?=a |an |the )", "", fields["place"])  # "by the sea": the sea
    else:
        about = _fill(rng.choice(plot.topics), fields)
    templates, weights = zip(*ASKS, strict=True)
    return rng.choices(templates, weights)[0].format(about)
