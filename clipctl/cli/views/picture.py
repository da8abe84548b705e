"""A screen of characters as a picture.

Braille dots, blocks and frames are drawn as shapes, because few fonts have them. Letters come from one of the system's
monospaced fonts, or from Pillow's own if none of the usual ones is installed.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

CELL = (12, 24)  # pixels
FONT_PX = 19
FONTS = ("DejaVuSansMono.ttf", "Menlo.ttc", "consola.ttf", "LiberationMono-Regular.ttf", "NotoSansMono-Regular.ttf")
RGB = tuple[int, int, int]
THEMES = {
    True: (DEFAULT_TERMINAL_THEME, (250, 250, 252), (36, 40, 54)),
    False: (DIMMED_MONOKAI, (22, 24, 34), (206, 212, 226)),
}
_EIGHTHS_WIDE = "▏▎▍▌▋▊▉█"
_EIGHTHS_HIGH = "▁▂▃▄▅▆▇█"
# Corners as shares of a cell, from its upper left.
_SHAPES = {
    "◆": ((0.5, 0.3), (0.95, 0.5), (0.5, 0.7), (0.05, 0.5)),
    "▲": ((0.5, 0.3), (0.95, 0.7), (0.05, 0.7)),
    "▼": ((0.5, 0.7), (0.95, 0.3), (0.05, 0.3)),
    "▸": ((0.2, 0.3), (0.9, 0.5), (0.2, 0.7)),
}
_STROKES = {
    "✓": ((0.1, 0.55), (0.4, 0.7), (0.95, 0.3)),
    "✗": ((0.1, 0.3), (0.9, 0.7), (0.5, 0.5), (0.1, 0.7), (0.9, 0.3)),
    "→": ((0.0, 0.5), (0.95, 0.5), (0.6, 0.35), (0.95, 0.5), (0.6, 0.65)),
}
# Which sides of a cell a line goes to from its middle: left, right, up, down.
_LINES = {"─": "lr", "│": "ud", "╭": "rd", "╮": "ld", "╰": "ru", "╯": "lu", "┤": "lud"}


def terminal_theme(*, is_light: bool) -> TerminalTheme:
    """The same colours for what draws SVG."""
    theme, background, foreground = THEMES[is_light]
    names = [theme.ansi_colors[number] for number in range(16)]
    return TerminalTheme(background, foreground, [(red, green, blue) for red, green, blue in names])


def draw(lines: Sequence[Text], width: int, height: int, *, is_light: bool) -> Image.Image:
    theme, background, foreground = THEMES[is_light]
    picture = Image.new("RGB", (width * CELL[0] + 2 * CELL[0], height * CELL[1] + CELL[1]), background)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        column = 0
        for characters, style in _pieces(line):
            colours = _colours(style, theme, foreground, background)
            for character in characters:
                place = (CELL[0] + column * CELL[0], CELL[1] // 2 + row * CELL[1])
                if style.bgcolor:
                    pen.rectangle((*place, place[0] + CELL[0] - 1, place[1] + CELL[1] - 1), fill=colours[1])
                _draw_cell(pen, place, character, *colours, bold=bool(style.bold))
                column += max(1, cell_len(character))
    return picture


def _pieces(line: Text) -> list[tuple[str, Style]]:
    """The line in pieces of one style each."""
    base = Style.parse(line.style) if isinstance(line.style, str) else line.style
    styles = [base] * len(line.plain)
    for span in line.spans:
        style = _parsed(span.style) if isinstance(span.style, str) else span.style
        for place in range(max(0, span.start), min(span.end, len(styles))):
            styles[place] = styles[place] + style
    return list(zip(line.plain, styles, strict=True))


@cache
def _parsed(words: str) -> Style:
    return Style.parse(words)


def _colours(style: Style, theme: TerminalTheme, foreground: RGB, background: RGB) -> tuple[RGB, RGB]:
    ink = _rgb(style.color, theme, foreground)
    if style.dim:
        ink = _mixed(ink, background, 1 / 2)
    return ink, _rgb(style.bgcolor, theme, background)


def _mixed(ink: RGB, paper: RGB, share: float) -> RGB:
    red, green, blue = (round(share * mine + (1 - share) * other) for mine, other in zip(ink, paper, strict=True))
    return red, green, blue


def _rgb(colour: Color | None, theme: TerminalTheme, default: RGB) -> RGB:
    if colour is None or colour.is_default:
        return default
    red, green, blue = colour.get_truecolor(theme)
    return red, green, blue


def _draw_cell(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], character: str, ink: RGB, paper: RGB, *, bold: bool
) -> None:
    (x, y), (width, height) = place, CELL
    if 0x2800 <= ord(character) <= 0x28FF:
        _draw_dots(pen, x, y, ord(character) - 0x2800, ink)
    elif character in _EIGHTHS_WIDE:
        share = (_EIGHTHS_WIDE.index(character) + 1) / 8
        pen.rectangle((x, y + 2, x + round(width * share) - 1, y + height - 3), fill=ink)
    elif character in _EIGHTHS_HIGH:
        top = y + height - round(height * (_EIGHTHS_HIGH.index(character) + 1) / 8)
        pen.rectangle((x, top, x + width - 2, y + height - 1), fill=ink)
    elif character == "▀":
        pen.rectangle((x, y, x + width - 1, y + height // 2 - 1), fill=ink)
    elif character == "░":
        pen.rectangle((x, y + 2, x + width - 1, y + height - 3), fill=_mixed(ink, paper, 1 / 3))
    elif character in _SHAPES:
        pen.polygon([(x + width * left, y + height * down) for left, down in _SHAPES[character]], fill=ink)
    elif character == "●":
        pen.ellipse((x + 1, y + height // 2 - 5, x + 11, y + height // 2 + 5), fill=ink)
    elif character in _STROKES:
        pen.line([(x + width * left, y + height * down) for left, down in _STROKES[character]], fill=ink, width=2)
    elif character in _LINES:
        _draw_lines(pen, x, y, _LINES[character], ink)
    elif character != " ":
        pen.text((x + width // 2, y + height // 2), character, fill=ink, font=_font(), anchor="mm", stroke_width=0)
        if bold:
            pen.text((x + width // 2 + 0.6, y + height // 2), character, fill=ink, font=_font(), anchor="mm")


def _draw_dots(pen: ImageDraw.ImageDraw, x: int, y: int, bits: int, ink: RGB) -> None:
    order = (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)  # down the left column, then down the right one
    for number, bit in enumerate(order):
        if bits & bit:
            left, top = x + 3 + number // 4 * 6, y + 3 + number % 4 * 6
            pen.ellipse((left - 2, top - 2, left + 2, top + 2), fill=ink)


def _draw_lines(pen: ImageDraw.ImageDraw, x: int, y: int, sides: str, ink: RGB) -> None:
    width, height = CELL
    middle_x, middle_y = x + width // 2, y + height // 2
    # Rectangles, because a line of two pixels lies on one side or the other, depending on its direction.
    spans = {
        "l": (x, middle_y - 1, middle_x, middle_y),
        "r": (middle_x - 1, middle_y - 1, x + width - 1, middle_y),
        "u": (middle_x - 1, y, middle_x, middle_y),
        "d": (middle_x - 1, middle_y - 1, middle_x, y + height - 1),
    }
    for side in sides:
        pen.rectangle(spans[side], fill=ink)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for name in FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, FONT_PX)
    return ImageFont.load_default(FONT_PX)
