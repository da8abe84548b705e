"""The built-in dataset: drawn scenes whose captions say exactly what is drawn.

A scene is one combination of subject, colour, count, size, place and background. The picture and its caption
follow from (seed, index) alone. Combinations are divided between training and validation before any picture is
drawn, so a validation caption names a combination that no training picture shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipctl.data.source import Keys, key_of
from clipctl.data.synthetic.drawing import BACKGROUNDS, SUBJECTS, Canvas, Colour, shade

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
SIDES = {"small": 0.3, "big": 0.5}  # of a single subject, as a fraction of the picture's side

# Vertical position of the group's centre, scaled by the space that the group leaves free. Captions never mention left
# or right, so every picture may be mirrored.
PLACES = {"at the top": -1, "in the middle": 0, "at the bottom": 1}

# How much smaller each of one, two or three subjects is drawn than a single one, so that a group takes about the same
# space; and their positions around the group's centre, in units of their side.
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
    """What a caption states. Pictures of the same combination differ only in shade and exact position."""

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
    """`count` pairs of one split, balanced across subjects."""

    name = "synthetic"
    is_drawn = True

    def __init__(self, count: int, *, seed: int, validation: bool) -> None:
        self.count = count
        self.seed = seed
        self.validation = validation
        self._by_subject = _combinations(seed, validation)
        self.caption_counts = np.full(count, 1 if validation else len(WORDINGS))
        self.picture_keys = 2 * np.arange(count, dtype=np.uint64) + validation  # no two are drawn alike

    def __len__(self) -> int:
        return self.count

    def caption_count(self, index: int) -> int:
        return int(self.caption_counts[index])

    def picture_key(self, index: int) -> int:
        return int(self.picture_keys[index])

    @property
    def fingerprint(self) -> str:
        digest = sha256()
        for caption in self.all_captions():
            digest.update(f"{caption}\0".encode())
        return digest.hexdigest()

    @property
    def state(self) -> str:
        return self.fingerprint

    def label(self, index: int) -> str:
        return f"{self.name} {index}{' held out' * self.validation}"

    def combination(self, index: int) -> Combination:
        """Subjects take turns; each cycles through its own shuffled combinations."""
        turn, subject = divmod(index, len(self._by_subject))
        choices = self._by_subject[subject]
        return choices[turn % len(choices)]

    def captions(self, index: int) -> list[str]:
        """Every wording for a training picture; one random wording for a validation picture."""
        scene = self.combination(index)
        parts = {"subject": scene.phrase(), "place": scene.place, "background": scene.background}
        wordings = [wording.format(**parts) for wording in WORDINGS]
        return [str(self._rng(index).choice(wordings))] if self.validation else wordings

    def caption(self, index: int, which: int) -> str:
        return self.captions(index)[which]

    def category(self, index: int) -> str:
        subject = self.combination(index).subject
        return next(name for name, subjects in CATEGORIES.items() if subject in subjects)

    def all_captions(self) -> Iterator[str]:
        for index in range(self.count):
            yield from self.captions(index)

    def caption_key(self, index: int, which: int) -> int:
        return key_of(self.captions(index)[which].encode())

    def caption_keys(self, choice: NDArray[np.int64]) -> Keys:
        keys = (self.caption_key(index, int(which)) for index, which in enumerate(choice))
        return np.fromiter(keys, dtype=np.uint64, count=self.count)

    def all_caption_keys(self) -> Keys:
        return np.fromiter((key_of(caption.encode()) for caption in self.all_captions()), dtype=np.uint64)

    def caption_lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.all_captions()), dtype=np.int64)

    caption_sizes = caption_lengths  # all ASCII

    def caption_row(self, row: int) -> str:
        index, which = divmod(row, int(self.caption_counts[0]))
        return self.captions(index)[which]

    def alphabet(self) -> str:
        return "".join(sorted(set().union(*self.all_captions())))

    def picture(self, index: int, least_px: int) -> Image.Image:
        return draw_scene(self.combination(index), self._rng(index), least_px)

    square = picture

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, int(self.validation), index])


def draw_scene(scene: Combination, rng: np.random.Generator, size_px: int) -> Image.Image:
    """The scene with small random differences in shade, position and size, which the caption does not mention."""
    canvas = Canvas(size_px)
    BACKGROUNDS[scene.background](canvas, rng.uniform(0.52, 0.6))
    shrink, group = GROUPS[scene.count - 1]
    side = SIDES[scene.size] * shrink * rng.uniform(0.94, 1.06)
    colour = shade(COLOURS[scene.colour], rng.uniform(0.93, 1.05))
    # How far the group's centre may move up or down before its outermost subject touches the edge.
    room = 0.48 - (max(y for _, y in group) + 0.5) * side
    middle_x = 0.5 + rng.uniform(-0.03, 0.03)
    middle_y = 0.5 + room * PLACES[scene.place] + rng.uniform(-0.015, 0.015)
    for offset_x, offset_y in group:
        x, y = middle_x + offset_x * side, middle_y + offset_y * side
        SUBJECTS[scene.subject](canvas.pen(x, y, side, colour, mirrored=bool(rng.integers(2))))
    return canvas.picture()


def _combinations(seed: int, validation: bool) -> Sequence[Sequence[Combination]]:
    """For each subject, the shuffled combinations of one split; the two splits share none."""
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
