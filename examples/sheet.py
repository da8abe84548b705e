"""Draw the held-out pictures with their captions, as in the README:  python examples/sheet.py docs/pictures.png"""

import sys
import textwrap

from PIL import Image, ImageDraw, ImageFont

from clipctl.config.sections import DataConfig
from clipctl.data.catalog import open_data

COLUMNS, PICTURE_PX, GAP_PX, TEXT_PX = 6, 144, 12, 34


def main(path: str) -> None:
    source = open_data(DataConfig()).val
    rows = -(-len(source) // COLUMNS)
    width = COLUMNS * (PICTURE_PX + GAP_PX) + GAP_PX
    height = rows * (PICTURE_PX + TEXT_PX + GAP_PX) + GAP_PX
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    for index in range(len(source)):
        row, column = divmod(index, COLUMNS)
        x = GAP_PX + column * (PICTURE_PX + GAP_PX)
        y = GAP_PX + row * (PICTURE_PX + TEXT_PX + GAP_PX)
        sheet.paste(source.picture(index, PICTURE_PX), (x, y))
        caption = textwrap.fill(source.captions(index)[0], 27)
        draw.multiline_text((x, y + PICTURE_PX + 4), caption, fill="black", font=font, spacing=2)
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
