"""A contact sheet: what the model will see, with captions. No torch."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image, ImageDraw, ImageFont

from clipctl.data.bad import BadPictureError
from clipctl.data.inspection import sample_of
from clipctl.data.source import Source
from clipctl.errors import DataError
from clipctl.files import check_parent

COLUMNS, ROWS = 6, 4
PICTURE_PX, GAP_PX, LINE_PX = 160, 14, 14
CAPTION_LINES = 4  # plus one for the name
MADE_BY = "clipctl"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "Arial.ttf", "Helvetica.ttc", "LiberationSans-Regular.ttf")
_INK, _FAINT, _BAD = (40, 40, 40), (130, 130, 130), (160, 30, 30)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Cell(NamedTuple):
    """A picture with words below it."""

    picture: Callable[[int], Image.Image]  # as a square of so many pixels; raises BadPictureError
    words: str
    name: str


def source_sheet(source: Source, path: Path) -> None:
    """Evenly spaced pictures of a source, cropped to squares as in an evaluation, each above its first caption and its
    name."""
    cells = [
        Cell(partial(source.square, index), source.captions(index)[0], os.path.basename(source.label(index)))
        for index in sample_of(source, COLUMNS * ROWS)
    ]
    write_sheet(cells, path)


def check_sheet(path: Path) -> None:
    """Raise DataError if no picture can be saved under that name. Only an older sheet is replaced: no photograph."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"cannot write the sheet to {path}: unknown file type", f"use one of {', '.join(SUFFIXES)}")
    check_parent(path)
    if path.exists() and not _is_sheet(path):
        raise DataError(f"{path} exists, and is not a contact sheet by clipctl", "choose another name")


def _is_sheet(path: Path) -> bool:
    try:
        with Image.open(path) as picture:
            return picture.getexif().get(ExifTags.Base.Software) == MADE_BY
    except Exception:  # whatever it is, it is no sheet
        return False


def write_sheet(cells: Sequence[Cell], path: Path) -> None:
    check_sheet(path)
    cell_width, cell_height = PICTURE_PX + GAP_PX, PICTURE_PX + (CAPTION_LINES + 2) * LINE_PX
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * cell_width + GAP_PX, rows * cell_height + GAP_PX), "white")
    draw, font = ImageDraw.Draw(sheet), _font()
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        left, top = GAP_PX + column * cell_width, GAP_PX + row * cell_height
        try:
            sheet.paste(cell.picture(PICTURE_PX), (left, top))
            lines, ink = _folded(cell.words, font), _INK
        except BadPictureError as error:
            draw.rectangle((left, top, left + PICTURE_PX, top + PICTURE_PX), outline=_BAD)
            lines, ink = [str(error)], _BAD
        for line_number, line in enumerate(lines):
            draw.text((left, top + PICTURE_PX + 4 + line_number * LINE_PX), line, ink, font)
        name = _folded(cell.name, font)[0]
        draw.text((left, top + PICTURE_PX + 4 + len(lines) * LINE_PX), name, _FAINT, font)
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = MADE_BY
    try:
        sheet.save(path, exif=exif)
    except OSError as error:
        raise DataError(
            f"cannot write the sheet to {path}: {error.strerror or error}", "pass a path that you can write to"
        ) from None


def _font() -> Font:
    """A system font if possible: it covers more characters than Pillow's built-in one."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, 11)
        except OSError:
            continue
    return ImageFont.load_default(11)


def _folded(text: str, font: Font) -> list[str]:
    """Lines that fit below a picture; excess text is cut off."""
    lines, line = [], ""
    for word in text.split():
        if line and font.getlength(f"{line} {word}") > PICTURE_PX:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
        while font.getlength(line) > PICTURE_PX:  # a word that is too long
            line = line[:-1]
    lines.append(line)
    return lines if len(lines) <= CAPTION_LINES else [*lines[: CAPTION_LINES - 1], f"{lines[CAPTION_LINES - 1]} …"]
