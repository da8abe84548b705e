"""A contact sheet: what the model will see, with captions. No torch."""

import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from clipctl.data.inspection import sample_of
from clipctl.data.pictures import BadPictureError
from clipctl.data.source import Source
from clipctl.errors import DataError

COLUMNS, ROWS = 6, 4
PICTURE_PX, CAPTION_PX, GAP_PX = 160, 66, 12
LINE_CHARACTERS, CAPTION_LINES = 30, 4
_INK, _FAINT = (40, 40, 40), (160, 30, 30)


def write_sheet(source: Source, path: Path) -> None:
    """Pictures of the source, evenly spaced, each above its first caption."""
    cell_width, cell_height = PICTURE_PX + GAP_PX, PICTURE_PX + CAPTION_PX
    sheet = Image.new("RGB", (COLUMNS * cell_width + GAP_PX, ROWS * cell_height + GAP_PX), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    indices = list(sample_of(source, COLUMNS * ROWS))[: COLUMNS * ROWS]
    for number, index in enumerate(indices):
        row, column = divmod(number, COLUMNS)
        corner = (GAP_PX + column * cell_width, GAP_PX + row * cell_height)
        below = (corner[0], corner[1] + PICTURE_PX + 4)
        try:
            sheet.paste(source.square(index, PICTURE_PX), corner)
            draw.text(below, _folded(source.captions(index)[0]), _INK, font)
        except BadPictureError as error:
            draw.rectangle((*corner, corner[0] + PICTURE_PX, corner[1] + PICTURE_PX), outline=_FAINT)
            draw.text(below, str(error), _FAINT, font)
    try:
        sheet.save(path)
    except (ValueError, OSError) as error:
        raise DataError(f"cannot write the sheet to {path}: {error}", "name it .png or .jpg") from None


def _folded(caption: str) -> str:
    return "\n".join(textwrap.wrap(caption, LINE_CHARACTERS, max_lines=CAPTION_LINES, placeholder=" …"))
