"""What the model retrieves for captions that it was never trained on."""

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views.frame import beside, framed, padded, styled
from clipctl.cli.views.scene import Scene
from clipctl.runs.retrieval import SIDE_PX, Query
from clipctl.runs.rundir import RunDir

PICTURES_WIDTH = 3 * (SIDE_PX + 2) + 4


def page(scene: Scene, width: int, height: int) -> list[Text]:
    found, palette = scene.snapshot.retrieval, scene.palette
    title = "captions of unseen pictures, and where their picture ranks"
    if found is None:
        words = " after the first evaluation" if scene.view.step == 0 else " not recorded by this run"
        return framed(title, [Text(words, palette.dim)], width, height, palette)
    first = sum(query.rank == 1 for query in found.queries)
    note = f"{first} of {len(found.queries)} ranked first, step {found.step}"
    columns = max(1, (width - 3) // PICTURES_WIDTH) if scene.options.pictures else 1
    share, lines = (width - 3) // columns, list[Text]()
    longest = max((output.plain(query.caption).cell_len for query in found.queries), default=0)
    for start in range(0, len(found.queries), columns):
        part = found.queries[start : start + columns]
        drawn = [query_lines(scene, query, found.candidates, share - 2, longest) for query in part]
        lines += beside(*([padded(line, share) for line in one] for one in drawn))
    return framed(title, [Text(" ") + line for line in lines], width, height, palette, note)


def query_lines(scene: Scene, query: Query, candidates: int, width: int, caption_width: int) -> list[Text]:
    """The caption and its rank; below it, on request, the nearest pictures."""
    palette = scene.palette
    line = styled("✓ ", palette.good) if query.rank == 1 else styled("✗ ", palette.bad)
    place = styled(" → ", palette.dim).append(f"{query.rank:{len(str(candidates))}}", palette.strong)
    place.append(f" of {candidates}", palette.dim)
    arrow, style = ("▲", palette.good) if query.moved > 0 else ("▼", palette.bad)
    place.append(f" {arrow}{abs(query.moved)}".ljust(6) if query.moved else " " * 6, style)
    scores = Text("  ")
    for near in query.nearest:
        scores.append(f"{near.score:.2f} ", palette.good if near.is_right else palette.dim)
    tail = place + scores if width >= 60 else place
    words = output.plain(query.caption)
    words.truncate(min(caption_width, max(8, width - tail.cell_len - 2)), overflow="ellipsis", pad=True)
    lines = [line + words + tail]
    return [*lines, *thumbnails(scene, query)] if scene.options.pictures else lines


def thumbnails(scene: Scene, query: Query) -> list[Text]:
    """The nearest pictures, two pixels in a character; the right one is marked."""
    run, columns = RunDir(scene.snapshot.path), []
    for near in query.nearest:
        pixels = run.thumbnail(near.picture)
        mark, style = ("✓", scene.palette.good) if near.is_right else (" ", scene.palette.dim)
        head = styled(f"  {mark} {near.score:.2f}".ljust(SIDE_PX + 2), style)
        body = half_blocks(pixels) if pixels else [Text("no picture".ljust(SIDE_PX), scene.palette.dim)]
        columns.append([head, *(Text("  ") + line for line in body)])
    return beside(*columns) if columns else []


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
