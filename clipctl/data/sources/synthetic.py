"""The built-in dataset: drawn scenes whose captions say exactly what is drawn.

A scene is one combination of subject, colour, count, size, place and background. The picture and its caption
follow from (seed, index) alone. Combinations are divided between training and validation before any picture is
drawn, so a validation caption names a combination that no training picture shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image

from clipctl.data.sources.drawing import BACKGROUNDS, SUBJECTS, Canvas, Colour, shade

CATEGORIES = {
    "nature": ("tree", "flower", "mushroom", "mountain"),
    "animals": ("cat", "fish", "bird", "butterfly"),
    "urban": ("house", "car", "bus", "tower"),
    "food": ("apple", "cake", "carrot", "ice cream"),
}
PLURALS = {"fish": "fish", "butterfly": "butterflies", "bus": "buses"}  # the others take an s

COLOURS: dict[str, Colour] = {
    "red": (218, 48, 44),
    "yellow": (246, 216, 56),
    "green": (62, 160, 74),
    "blue": (56, 104, 214),
    "purple": (140, 70, 176),
    "white": (246, 246, 246),
}
COUNT_WORDS = ("a", "two", "three")
SIDES = {"small": 0.3, "big": 0.5}  # of a single subject, in shares of the picture's side

# Where the middle of the group stands: up or down, scaled by the room its extent leaves. Nothing is said of left and
# right, so every picture may be mirrored.
PLACES = {"at the top": -1, "in the middle": 0, "at the bottom": 1}

# How one, two and three subjects stand around their middle, in units of their side, and how much smaller each is drawn
# than a single one, so that a group takes about the same room.
GROUPS = (
    (1.0, ((0.0, 0.0),)),
    (0.77, ((-0.48, 0.0), (0.48, 0.0))),
    (0.67, ((0.0, -0.46), (-0.48, 0.46), (0.48, 0.46))),
)

WORDINGS = (
    "{subject} {place}, {background}",
    "{subject} {background}, {place}",
    "{background}: {subject} {place}",
    "{background} {place}, {subject}",
    "{place} {background}, {subject}",
    "{place}: {subject} {background}",
    "drawing of {subject} {background}, {place}",
    "here: {subject} {place}, {background}",
)

VALIDATION_SHARE = 0.1  # of the combinations of each subject


@dataclass(frozen=True, order=True)
class Combination:
    """What a caption states. Two pictures of the same combination may differ in shade and exact position only."""

    subject: str
    colour: str
    count: int
    size: str
    place: str
    background: str

    def phrase(self) -> str:
        """The subject part of a caption, such as "two small red apples"."""
        noun = self.subject if self.count == 1 else PLURALS.get(self.subject, f"{self.subject}s")
        return f"{COUNT_WORDS[self.count - 1]} {self.size} {self.colour} {noun}"


class SyntheticSource:
    """`count` pairs of one side of the division, balanced over subjects."""

    def __init__(self, count: int, *, seed: int, validation: bool) -> None:
        self.count = count
        self.seed = seed
        self.validation = validation
        self._by_subject = _combinations(seed, validation)

    def __len__(self) -> int:
        return self.count

    def combination(self, index: int) -> Combination:
        """Subjects take turns; each walks through its own shuffled combinations, over and over."""
        turn, subject = divmod(index, len(self._by_subject))
        choices = self._by_subject[subject]
        return choices[turn % len(choices)]

    def captions(self, index: int) -> list[str]:
        """Every wording for a training picture; one of them, by chance, for a validation picture."""
        scene = self.combination(index)
        parts = {"subject": scene.phrase(), "place": scene.place, "background": scene.background}
        wordings = [wording.format(**parts) for wording in WORDINGS]
        return [str(self._rng(index).choice(wordings))] if self.validation else wordings

    def category(self, index: int) -> str:
        subject = self.combination(index).subject
        return next(name for name, subjects in CATEGORIES.items() if subject in subjects)

    def picture(self, index: int, size_px: int) -> Image.Image:
        return draw_scene(self.combination(index), self._rng(index), size_px)

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, int(self.validation), index])


def draw_scene(scene: Combination, rng: np.random.Generator, size_px: int) -> Image.Image:
    """The scene with small random differences in shade, position and size, which the caption does not mention."""
    canvas = Canvas(size_px)
    BACKGROUNDS[scene.background](canvas, rng.uniform(0.52, 0.6))
    shrink, group = GROUPS[scene.count - 1]
    side = SIDES[scene.size] * shrink * rng.uniform(0.94, 1.06)
    colour = shade(COLOURS[scene.colour], rng.uniform(0.93, 1.05))
    # How far the group's middle may move up or down before its outermost subject touches the edge.
    room = 0.48 - (max(y for _, y in group) + 0.5) * side
    middle_x = 0.5 + rng.uniform(-0.03, 0.03)
    middle_y = 0.5 + room * PLACES[scene.place] + rng.uniform(-0.015, 0.015)
    for offset_x, offset_y in group:
        x, y = middle_x + offset_x * side, middle_y + offset_y * side
        SUBJECTS[scene.subject](canvas.pen(x, y, side, colour, mirrored=bool(rng.integers(2))))
    return canvas.picture()


def _combinations(seed: int, validation: bool) -> Sequence[Sequence[Combination]]:
    """For each subject the shuffled combinations of one side; the two sides share none."""
    subjects = [subject for group in zip(*CATEGORIES.values(), strict=True) for subject in group]
    counts = range(1, len(COUNT_WORDS) + 1)
    attributes = list(product(COLOURS, counts, SIDES, PLACES, BACKGROUNDS))
    held_out = round(len(attributes) * VALIDATION_SHARE)
    chosen = []
    for number, subject in enumerate(subjects):
        order = np.random.default_rng([seed, number]).permutation(len(attributes))
        side = order[:held_out] if validation else order[held_out:]
        chosen.append([Combination(subject, *attributes[i]) for i in side])
    return chosen
