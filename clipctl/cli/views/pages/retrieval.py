"""What the model retrieves for captions that it was never trained on."""

from collections.abc import Sequence
from functools import lru_cache

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views.frame import LEAST_FRAMED, beside, headed, hidden, padded, styled, window
from clipctl.cli.views.scene import Scene
from clipctl.runs.retrieval import MOST_CAPTIONS, MOST_NEAREST, SIDE_PX, Query, Retrieval

PICTURES_WIDTH = 3 * (SIDE_PX + 2) + 4
PICTURES_HEIGHT = 2 + SIDE_PX // 2  # the caption, the scores, the pictures
TITLE = "captions of unseen pictures, and where their picture ranks"

SCORE_WIDTH = 7  # of one score in a line
SCORES_WIDTH = 64  # of a page that shows them
PLACE_PADDING = 6  # behind a rank, for how far it has moved


def page(scene: Scene, width: int, height: int) -> list[Text]:
    found, palette = scene.snapshot.retrieval, scene.palette
    if found is None:
        words = " after the first evaluation" if scene.view.step == 0 else " not recorded by this run"
        return headed(TITLE, [Text(words, palette.dim)], width, height, palette)
    first = sum(query.rank == 1 for query in found.queries)
    notes = (f"{first} of {len(found.queries)} ranked first, step {found.step}", f"{first}/{len(found.queries)} first")
    longest = max((output.plain(query.caption).cell_len for query in found.queries), default=0)
    if shows_pictures(scene, width, height):
        lines, foot = _picture_rows(scene, found, width, height, longest)
    else:
        lines, foot = _text_rows(scene, found, width, height, longest)
        obstacle = _obstacle(scene, width, height) if scene.options.pictures else ""
        foot = ", ".join(words for words in (foot, obstacle) if words)
    return headed(TITLE, [Text(" ") + line for line in lines], width, height, palette, *notes, foot=foot)


def shows_pictures(scene: Scene, width: int, height: int) -> bool:
    """Whether a page of this size shows thumbnails: if asked to and it can, or of itself if it has room for all."""
    found = scene.snapshot.retrieval
    if found is None or _obstacle(scene, width, height):
        return False
    if scene.options.pictures is not None:
        return scene.options.pictures
    rows = -(-len(found.queries) // _picture_columns(width))
    has_room = rows * PICTURES_HEIGHT <= height - 2
    return has_room and scene.options.colours == "truecolor" and bool(scene.snapshot.thumbnails)


def _obstacle(scene: Scene, width: int, height: int) -> str:
    """Why there can be no pictures; empty if there can."""
    if scene.options.ascii_only or scene.options.colours not in ("truecolor", "256"):
        return "pictures need 256 colours or more"
    if width < PICTURES_WIDTH + 3 or height < PICTURES_HEIGHT + 2:
        return "pictures need a larger terminal"
    return ""


def _picture_columns(width: int) -> int:
    return max(1, (width - 3) // PICTURES_WIDTH)


def _picture_rows(scene: Scene, found: Retrieval, width: int, height: int, longest: int) -> tuple[list[Text], str]:
    """Whole rows of captions with pictures, the next captions without, and how many have their pictures hidden."""
    columns, queries, lines = _picture_columns(width), found.queries, list[Text]()
    share = (width - 3) // columns
    rows = window(-(-len(queries) // columns), (height - 2) // PICTURES_HEIGHT, scene.options.scroll)
    for row in rows:
        drawn = []
        for query in queries[row * columns : (row + 1) * columns]:
            caption = query_line(scene, query, found.candidates, share - 2, longest)
            drawn.append([padded(line, share) for line in (caption, *thumbnails(scene, query))])
        lines += beside(*drawn)
    after = queries[rows.stop * columns :]
    lines += _captions(scene, found, after[: height - 2 - len(lines)], width, longest)
    return lines, hidden(rows.start * columns, len(after))


def _text_rows(scene: Scene, found: Retrieval, width: int, height: int, longest: int) -> tuple[list[Text], str]:
    """A line for each caption below a heading, and what is hidden."""
    has_heading = height >= LEAST_FRAMED + 1
    room = height - 2 - has_heading if height >= LEAST_FRAMED else height - 1
    shown = window(len(found.queries), room, scene.options.scroll)
    lines = _captions(scene, found, [found.queries[index] for index in shown], width, longest)
    if has_heading and lines:
        lines.insert(0, _heading(scene, found, lines[0].cell_len, width))
    return lines, hidden(shown.start, len(found.queries) - shown.stop)


def _captions(scene: Scene, found: Retrieval, queries: Sequence[Query], width: int, longest: int) -> list[Text]:
    lines = []
    for query in queries:
        figures = scores(scene, query) if width >= SCORES_WIDTH else Text()
        lines.append(query_line(scene, query, found.candidates, width - 5 - figures.cell_len, longest) + figures)
    return lines


def _heading(scene: Scene, found: Retrieval, length: int, width: int) -> Text:
    """Names above the parts of a line of this length."""
    has_scores = width >= SCORES_WIDTH
    end = length - (SCORE_WIDTH * len(found.queries[0].nearest) if has_scores else 0)  # of the rank and its movement
    line = styled("  caption", scene.palette.dim)
    line.pad_right(max(1, end - PLACE_PADDING - len(f"rank of {found.candidates}") - line.cell_len))
    line.append("rank", scene.palette.dim)
    if has_scores:
        line.pad_right(max(1, end + 2 - line.cell_len))
        line.append("similarity", scene.palette.dim)
    return line


def query_line(scene: Scene, query: Query, candidates: int, width: int, caption_width: int) -> Text:
    """The caption, its rank, and by how many places that has changed."""
    palette = scene.palette
    line = styled("✓ ", palette.good) if query.rank == 1 else styled("✗ ", palette.bad)
    place = styled(" → ", palette.dim).append(f"{query.rank:{len(str(candidates))}}", palette.strong)
    place.append(f" of {candidates}", palette.dim)
    arrow, style = ("▲", palette.good) if query.moved > 0 else ("▼", palette.bad)
    place.append(f" {arrow}{abs(query.moved)}".ljust(PLACE_PADDING) if query.moved else " " * PLACE_PADDING, style)
    room = width - place.cell_len - 2
    words = output.plain(query.caption)
    words.truncate(min(caption_width, max(8, room)), overflow="ellipsis", pad=True)
    return line + words + place


def scores(scene: Scene, query: Query) -> Text:
    """The similarity of the nearest pictures; the right one is marked."""
    line = Text()
    for near in query.nearest:
        mark, style = ("✓", scene.palette.good) if near.is_right else (" ", scene.palette.dim)
        line.append(f" {mark}{near.score:.2f}".ljust(SCORE_WIDTH), style)
    return line


def thumbnails(scene: Scene, query: Query) -> list[Text]:
    """The nearest pictures, two pixels in a character; the right one is marked."""
    columns = []
    for near in query.nearest:
        pixels = scene.snapshot.thumbnails.get(near.picture)
        mark, style = ("✓", scene.palette.good) if near.is_right else (" ", scene.palette.dim)
        head = styled(f"  {mark} {near.score:.2f}".ljust(SIDE_PX + 2), style)
        body = half_blocks(pixels) if pixels else [Text("no picture".ljust(SIDE_PX), scene.palette.dim)]
        columns.append([head, *(Text("  ") + line for line in body)])
    return beside(*columns) if columns else []


@lru_cache(maxsize=MOST_CAPTIONS * MOST_NEAREST)
def half_blocks(pixels: bytes) -> list[Text]:
    """A picture of SIDE_PX × SIDE_PX pixels: the upper half of each character in one colour, the lower in another."""

    def colour(row: int, column: int) -> str:
        start = (row * SIDE_PX + column) * 3
        return "#{:02x}{:02x}{:02x}".format(*pixels[start : start + 3])

    lines = []
    for row in range(0, SIDE_PX, 2):
        line = Text()
        for column in range(SIDE_PX):
            line.append("▀", f"{colour(row, column)} on {colour(row + 1, column)}")
        lines.append(line)
    return lines
