"""A corpus of small stories: few words, but whoever continues one must know who holds what."""

from __future__ import annotations

import random

SEPARATOR = "<|endoftext|>"
_NAMES = {
    "she": ("Mia", "Ann", "Zoe", "Lily", "Emma", "Rosa", "Nora", "Ivy"),
    "he": ("Ben", "Tom", "Max", "Leo", "Sam", "Otto", "Hugo", "Finn"),
}
_POSSESSIVE = {"she": "her", "he": "his"}
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
_THINGS = ("ball", "kite", "book", "cup", "hat", "boat", "drum", "lamp", "box", "key")
_PLACES = ("garden", "park", "kitchen", "barn", "school", "forest", "market", "library")
_WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "cloudy")

_OPENINGS = (
    "It was a {weather} day. {a} went to the {place}.",
    "One {weather} day, {a} was in the {place}.",
    "{a} liked the {place}. On a {weather} day {a_he} went there.",
)
_FINDS = (
    "There {a_he} found a {colour} {thing}.",
    "In the {place} {a_he} saw a {colour} {thing} and picked it up.",
    "A {colour} {thing} lay in the {place}, and {a} took it home.",
)
_MEETINGS = (
    "Then {b} came. {b} liked the {colour} {thing}.",
    "{a} showed the {colour} {thing} to {a_his} friend {b}.",
    '{b} asked, "May I see the {colour} {thing}?"',
)
_ENDINGS = (
    "So {a} gave the {colour} {thing} to {b}. Now the {colour} {thing} belongs to {b}.",
    '"You can have it," said {a}. Now the {colour} {thing} belongs to {b}.',
    '"No, I will keep it," said {a}. The {colour} {thing} still belongs to {a}.',
    "But {a} did not want to give it away. The {colour} {thing} still belongs to {a}.",
)
_CLOSINGS = (
    "{b} said goodbye, and {a} went home.",
    "They played in the {place} until night.",
    "{a} and {b} were happy.",
)


def make_story(rng: random.Random) -> str:
    """Return one story of five or six sentences."""
    genders = [rng.choice(("she", "he")) for _ in range(2)]
    a = rng.choice(_NAMES[genders[0]])
    b = rng.choice([name for name in _NAMES[genders[1]] if name != a])
    parts = (_OPENINGS, _FINDS, _MEETINGS, _ENDINGS, _CLOSINGS)
    return " ".join(rng.choice(sentences) for sentences in parts).format(
        a=a,
        b=b,
        a_he=genders[0],
        a_his=_POSSESSIVE[genders[0]],
        colour=rng.choice(_COLOURS),
        thing=rng.choice(_THINGS),
        place=rng.choice(_PLACES),
        weather=rng.choice(_WEATHER),
    )


def make_corpus(num_stories: int, *, seed: int) -> str:
    """Return ``num_stories`` stories with a line of ``SEPARATOR`` after each."""
    rng = random.Random(seed)
    return "".join(f"{make_story(rng)}\n{SEPARATOR}\n" for _ in range(num_stories))
