"""How the built-in pictures are drawn: sixteen subjects and six backgrounds, with Pillow.

Everything is drawn in unit coordinates, so a picture of any resolution shows the same scene.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

INK: Colour = (40, 36, 44)
PAPER: Colour = (250, 248, 240)
WOOD: Colour = (122, 84, 54)
LEAF: Colour = (70, 140, 66)
GLASS: Colour = (188, 222, 240)
CREAM: Colour = (240, 206, 150)


def shade(colour: Colour, factor: float) -> Colour:
    """Darker below 1, lighter above."""
    red, green, blue = (max(0, min(255, round(value * factor))) for value in colour)
    return red, green, blue


class Pen:
    """Draws inside one square of the canvas, whose corners are (0, 0) and (1, 1)."""

    def __init__(
        self, draw: ImageDraw.ImageDraw, left_px: float, top_px: float, side_px: float, colour: Colour, mirrored: bool
    ) -> None:
        self._draw = draw
        self._left, self._top, self._side = left_px, top_px, side_px
        self._mirrored = mirrored
        self._outline_px = max(1, round(side_px * 0.03))
        self.colour = colour
        self.dark = shade(colour, 0.72)

    def polygon(self, points: Sequence[Point], fill: Colour) -> None:
        self._draw.polygon(self._px(points), fill=fill, outline=INK, width=self._outline_px)

    def box(self, left: float, top: float, right: float, bottom: float, fill: Colour) -> None:
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], fill)

    def oval(self, x: float, y: float, radius_x: float, radius_y: float, fill: Colour) -> None:
        self._draw.ellipse(self._box_px(x, y, radius_x, radius_y), fill=fill, outline=INK, width=self._outline_px)

    def half_disc(self, x: float, y: float, radius_x: float, radius_y: float, fill: Colour) -> None:
        """The upper half of an oval, flat side down."""
        box = self._box_px(x, y, radius_x, radius_y)
        self._draw.pieslice(box, 180, 360, fill=fill, outline=INK, width=self._outline_px)

    def line(self, points: Sequence[Point], width: float, fill: Colour = INK) -> None:
        self._draw.line(self._px(points), fill=fill, width=max(1, round(width * self._side)), joint="curve")

    def _px(self, points: Sequence[Point]) -> list[Point]:
        return [
            (self._left + (1 - x if self._mirrored else x) * self._side, self._top + y * self._side) for x, y in points
        ]

    def _box_px(self, x: float, y: float, radius_x: float, radius_y: float) -> list[Point]:
        (centre_x, centre_y) = self._px([(x, y)])[0]
        reach_x, reach_y = radius_x * self._side, radius_y * self._side
        return [(centre_x - reach_x, centre_y - reach_y), (centre_x + reach_x, centre_y + reach_y)]


# --- nature ---------------------------------------------------------------------------------------------------


def tree(pen: Pen) -> None:
    pen.box(0.42, 0.6, 0.58, 1.0, WOOD)
    pen.oval(0.28, 0.48, 0.22, 0.2, pen.dark)
    pen.oval(0.72, 0.48, 0.22, 0.2, pen.dark)
    pen.oval(0.5, 0.3, 0.32, 0.28, pen.colour)


def flower(pen: Pen) -> None:
    pen.line([(0.5, 0.5), (0.5, 1.0)], 0.08, LEAF)
    pen.oval(0.66, 0.84, 0.15, 0.07, LEAF)
    for x, y in ((0.5, 0.14), (0.73, 0.3), (0.65, 0.56), (0.35, 0.56), (0.27, 0.3)):
        pen.oval(x, y, 0.15, 0.15, pen.colour)
    pen.oval(0.5, 0.36, 0.13, 0.13, CREAM)


def mushroom(pen: Pen) -> None:
    pen.box(0.37, 0.52, 0.63, 1.0, PAPER)
    pen.half_disc(0.5, 0.58, 0.48, 0.5, pen.colour)
    for x, y, radius in ((0.32, 0.4, 0.08), (0.56, 0.26, 0.09), (0.76, 0.44, 0.07)):
        pen.oval(x, y, radius, radius, PAPER)


def mountain(pen: Pen) -> None:
    pen.polygon([(0.4, 1.0), (0.74, 0.3), (1.0, 1.0)], pen.dark)
    pen.polygon([(0.0, 1.0), (0.4, 0.06), (0.8, 1.0)], pen.colour)
    pen.polygon([(0.27, 0.37), (0.4, 0.06), (0.53, 0.37), (0.44, 0.3), (0.38, 0.42), (0.34, 0.31)], PAPER)


# --- animals --------------------------------------------------------------------------------------------------


def cat(pen: Pen) -> None:
    pen.line([(0.82, 0.9), (0.96, 0.74), (0.92, 0.5)], 0.09, pen.dark)
    pen.oval(0.56, 0.76, 0.32, 0.24, pen.colour)
    pen.polygon([(0.1, 0.4), (0.12, 0.04), (0.36, 0.22)], pen.dark)
    pen.polygon([(0.68, 0.4), (0.66, 0.04), (0.42, 0.22)], pen.dark)
    pen.oval(0.39, 0.4, 0.31, 0.27, pen.colour)
    for x in (0.28, 0.5):
        pen.oval(x, 0.36, 0.055, 0.075, PAPER)
        pen.oval(x, 0.37, 0.02, 0.05, INK)
    pen.polygon([(0.34, 0.48), (0.44, 0.48), (0.39, 0.55)], INK)


def fish(pen: Pen) -> None:
    pen.polygon([(0.62, 0.5), (1.0, 0.2), (0.92, 0.5), (1.0, 0.8)], pen.dark)
    pen.polygon([(0.34, 0.3), (0.5, 0.08), (0.62, 0.34)], pen.dark)
    pen.oval(0.38, 0.5, 0.37, 0.25, pen.colour)
    pen.oval(0.2, 0.44, 0.07, 0.07, PAPER)
    pen.oval(0.19, 0.44, 0.025, 0.025, INK)


def bird(pen: Pen) -> None:
    pen.line([(0.46, 0.78), (0.44, 1.0)], 0.05)
    pen.line([(0.58, 0.78), (0.58, 1.0)], 0.05)
    pen.polygon([(0.74, 0.5), (1.0, 0.34), (0.96, 0.62)], pen.dark)
    pen.oval(0.52, 0.6, 0.3, 0.24, pen.colour)
    pen.polygon([(0.16, 0.3), (0.0, 0.4), (0.18, 0.44)], CREAM)
    pen.oval(0.3, 0.32, 0.19, 0.19, pen.colour)
    pen.oval(0.25, 0.28, 0.045, 0.045, INK)
    pen.oval(0.6, 0.58, 0.17, 0.12, pen.dark)


def butterfly(pen: Pen) -> None:
    for side in (-1, 1):
        pen.oval(0.5 + side * 0.22, 0.7, 0.18, 0.2, pen.dark)
        pen.oval(0.5 + side * 0.26, 0.36, 0.24, 0.26, pen.colour)
        pen.oval(0.5 + side * 0.28, 0.36, 0.09, 0.1, PAPER)
        pen.line([(0.5, 0.24), (0.5 + side * 0.12, 0.04)], 0.04)
    pen.oval(0.5, 0.52, 0.06, 0.34, INK)


# --- urban ----------------------------------------------------------------------------------------------------


def house(pen: Pen) -> None:
    pen.box(0.66, 0.08, 0.8, 0.4, WOOD)
    pen.box(0.12, 0.46, 0.88, 1.0, pen.colour)
    pen.polygon([(0.0, 0.48), (0.5, 0.06), (1.0, 0.48)], pen.dark)
    pen.box(0.22, 0.6, 0.42, 0.78, GLASS)
    pen.box(0.56, 0.62, 0.76, 1.0, WOOD)


def car(pen: Pen) -> None:
    pen.polygon([(0.22, 0.52), (0.36, 0.26), (0.7, 0.26), (0.84, 0.52)], GLASS)
    pen.line([(0.53, 0.26), (0.53, 0.52)], 0.06)
    pen.box(0.0, 0.5, 1.0, 0.76, pen.colour)
    for x in (0.24, 0.76):
        pen.oval(x, 0.77, 0.14, 0.14, INK)
        pen.oval(x, 0.77, 0.06, 0.06, PAPER)


def bus(pen: Pen) -> None:
    pen.box(0.0, 0.14, 1.0, 0.84, pen.colour)
    for left in (0.06, 0.29, 0.52):
        pen.box(left, 0.24, left + 0.18, 0.48, GLASS)
    pen.box(0.76, 0.24, 0.94, 0.78, GLASS)
    pen.line([(0.0, 0.6), (0.74, 0.6)], 0.06, PAPER)
    for x in (0.22, 0.66):
        pen.oval(x, 0.85, 0.12, 0.12, INK)


def tower(pen: Pen) -> None:
    pen.line([(0.5, 0.0), (0.5, 0.2)], 0.05)
    pen.box(0.38, 0.14, 0.62, 0.34, pen.dark)
    pen.box(0.26, 0.3, 0.74, 1.0, pen.colour)
    for top in (0.38, 0.54, 0.7):
        for left in (0.33, 0.54):
            pen.box(left, top, left + 0.13, top + 0.1, GLASS)
    pen.box(0.43, 0.86, 0.57, 1.0, INK)


# --- food -----------------------------------------------------------------------------------------------------


def apple(pen: Pen) -> None:
    outline = [(0.5, 0.36), (0.64, 0.28), (0.82, 0.31), (0.94, 0.46), (0.95, 0.64), (0.86, 0.84), (0.7, 0.97)]
    outline += [(0.58, 0.97), (0.5, 0.94)]
    pen.polygon(outline + [(1 - x, y) for x, y in reversed(outline)], pen.colour)
    pen.oval(0.28, 0.52, 0.06, 0.1, PAPER)
    pen.line([(0.5, 0.4), (0.54, 0.1)], 0.08, WOOD)
    pen.oval(0.7, 0.16, 0.16, 0.08, LEAF)


def cake(pen: Pen) -> None:
    for x in (0.3, 0.5, 0.7):
        pen.line([(x, 0.16), (x, 0.38)], 0.06, PAPER)
        pen.oval(x, 0.12, 0.035, 0.07, CREAM)
    pen.box(0.14, 0.36, 0.86, 0.62, PAPER)
    pen.box(0.04, 0.58, 0.96, 0.94, pen.colour)
    for left in (0.04, 0.272, 0.504, 0.736):
        pen.oval(left + 0.112, 0.6, 0.112, 0.1, PAPER)


def carrot(pen: Pen) -> None:
    for tip in ((0.3, 0.02), (0.5, -0.02), (0.7, 0.02)):
        pen.line([(0.5, 0.32), tip], 0.09, LEAF)
    pen.polygon([(0.26, 0.3), (0.4, 0.24), (0.6, 0.24), (0.74, 0.3), (0.5, 1.0)], pen.colour)
    pen.line([(0.3, 0.42), (0.48, 0.44)], 0.04, pen.dark)
    pen.line([(0.54, 0.58), (0.64, 0.57)], 0.04, pen.dark)


def ice_cream(pen: Pen) -> None:
    pen.polygon([(0.26, 0.46), (0.74, 0.46), (0.5, 1.0)], CREAM)
    pen.line([(0.36, 0.5), (0.6, 0.78)], 0.03, WOOD)
    pen.line([(0.64, 0.5), (0.4, 0.78)], 0.03, WOOD)
    pen.oval(0.35, 0.38, 0.18, 0.16, pen.dark)
    pen.oval(0.65, 0.38, 0.18, 0.16, pen.dark)
    pen.oval(0.5, 0.2, 0.22, 0.2, pen.colour)


SUBJECTS: dict[str, Callable[[Pen], None]] = {
    "tree": tree,
    "flower": flower,
    "mushroom": mushroom,
    "mountain": mountain,
    "cat": cat,
    "fish": fish,
    "bird": bird,
    "butterfly": butterfly,
    "house": house,
    "car": car,
    "bus": bus,
    "tower": tower,
    "apple": apple,
    "cake": cake,
    "carrot": carrot,
    "ice cream": ice_cream,
}


# --- backgrounds ----------------------------------------------------------------------------------------------


class Canvas:
    """The whole picture while it is being drawn, at four times the final size, so that edges come out smooth."""

    OVERSAMPLING = 4

    def __init__(self, size_px: int) -> None:
        self.size_px = size_px
        self.side_px = size_px * self.OVERSAMPLING
        self.image = Image.new("RGB", (self.side_px, self.side_px))
        self.draw = ImageDraw.Draw(self.image)

    def band(self, top: float, bottom: float, fill: Colour) -> None:
        self.draw.rectangle([0, top * self.side_px, self.side_px, bottom * self.side_px], fill=fill)

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        self.oval(x, y, radius, radius, fill)

    def oval(self, x: float, y: float, radius_x: float, radius_y: float, fill: Colour) -> None:
        side = self.side_px
        self.draw.ellipse(
            [(x - radius_x) * side, (y - radius_y) * side, (x + radius_x) * side, (y + radius_y) * side], fill=fill
        )

    def polyline(self, points: Sequence[Point], width: float, fill: Colour) -> None:
        side = self.side_px
        for (x0, y0), (x1, y1) in pairwise(points):
            self.draw.line([x0 * side, y0 * side, x1 * side, y1 * side], fill=fill, width=max(1, round(width * side)))

    def pen(self, x: float, y: float, side: float, colour: Colour, mirrored: bool) -> Pen:
        """A pen for a subject centred at (x, y) in a square with this side, as fractions of the picture."""
        left, top = (x - side / 2) * self.side_px, (y - side / 2) * self.side_px
        return Pen(self.draw, left, top, side * self.side_px, colour, mirrored)

    def picture(self) -> Image.Image:
        return self.image.resize((self.size_px, self.size_px), Image.Resampling.BOX)


def _scattered(i: int, height: float) -> Point:
    """The i-th point of an even spread over the upper part of the picture (a two-dimensional golden-ratio sequence)."""
    return (i * 0.7549 + 0.05) % 1, (i * 0.5698 + 0.05) % 1 * height


def meadow(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (150, 206, 240))
    canvas.band(horizon, 1, (128, 190, 92))
    for i in range(14):
        x, y = (i * 0.37 + 0.05) % 1, horizon + (i * 0.23 % 1) * (0.96 - horizon) + 0.03
        canvas.polyline([(x - 0.015, y), (x, y - 0.03), (x + 0.015, y)], 0.008, (88, 150, 62))


def desert(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (252, 214, 150))
    canvas.band(horizon, 1, (232, 178, 100))
    canvas.oval(0.2, horizon + 0.07, 0.4, 0.07, (222, 164, 86))
    canvas.oval(0.85, horizon + 0.11, 0.4, 0.08, (214, 154, 78))


def night(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (34, 36, 78))
    canvas.band(horizon, 1, (48, 54, 70))
    for i in range(18):
        canvas.disc(*_scattered(i, horizon), 0.007, (255, 250, 214))


def snow(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (196, 208, 220))
    canvas.band(horizon, 1, (244, 247, 252))
    for i in range(30):
        canvas.disc(*_scattered(i, 1.0), 0.011, (255, 255, 255))


def sea(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (206, 232, 246))
    canvas.band(horizon, 1, (52, 126, 182))
    for row in range(5):
        y = horizon + 0.06 + row * 0.1
        crests = [(i / 12, y + (0.014 if i % 2 else -0.014)) for i in range(13)]
        canvas.polyline(crests, 0.009, (124, 182, 220))


def table(canvas: Canvas, horizon: float) -> None:
    canvas.band(0, horizon, (232, 220, 206))
    canvas.band(horizon, 1, (160, 108, 70))
    for row in range(5):
        y = horizon + 0.03 + row * 0.11
        canvas.polyline([(0, y), (1, y)], 0.008, (132, 86, 54))


BACKGROUNDS: dict[str, Callable[[Canvas, float], None]] = {
    "in a meadow": meadow,
    "in the desert": desert,
    "at night": night,
    "in the snow": snow,
    "at sea": sea,
    "on a table": table,
}
