"""Tables of pictures and captions: separated by commas, tabs or pipes, with or without a header; and Flickr's token
files. No torch."""

import ast
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from clipctl.data.formats.roots import candidate_roots
from clipctl.data.formats.rows import UNSAID, Hints, Layout, Row, looks_like_picture, side_of
from clipctl.data.formats.text import read_lines, sample_lines
from clipctl.errors import DataError

PICTURE_NAMES = (
    *("filepath", "file_path", "image_path", "img_path", "image_file", "file_name", "filename", "image_name"),
    *("path", "image", "img", "picture", "photo", "file", "url"),
)
CAPTION_NAMES = (
    *("caption", "captions", "text", "title", "sentence", "sentences", "raw", "description", "prompt", "comment"),
    *("alt_text", "alt", "label"),
)
SIDE_NAMES = ("split", "subset", "partition", "set", "fold")
SEPARATORS = {",": "commas", "\t": "tabs", "|": "pipes", ";": "semicolons"}
SEPARATOR_WORDS = {"comma": ",", "tab": "\t", "\\t": "\t", "pipe": "|", "semicolon": ";"}
FORMAT_SEPARATORS = {"tsv": "\t", "pipe": "|"}
SAMPLE_ROWS = 200
LIST_LIMIT_CHARACTERS = 20_000
ROW_LIMIT_CHARACTERS = 8_000_000
SENTENCE_WORDS = 3  # average words per cell, at least, in a column of captions

_NUMBERED_CAPTION = re.compile(r"(caption|comment|sentence|text)[ _-]?\d+$")
_TOKEN_LINE = re.compile(r"^([^\t]+\.\w{3,4})#\d+\t(.*)$")
_ANNOUNCED_SEPARATOR = re.compile(r'^"?sep=(.)"?$')
_NUMBER_THEN_TEXT = re.compile(r"^\s*\d+\s+(\S.*)$")


@dataclass(frozen=True)
class Columns:
    """What each column holds."""

    separator: str
    is_quoted: bool
    names: Sequence[str]  # from the header; numbers from 1 if there is none
    skipped_lines: int  # lines before the first row
    picture: int
    captions: Sequence[int]
    side: int | None
    unknown_sides: Sequence[str] = ()  # values in that column that name no split

    @property
    def words(self) -> str:
        texts = ", ".join(self.names[column] for column in self.captions)
        side = f", split from column {self.names[self.side]}" if self.side is not None else ""
        side += f" ({', '.join(self.unknown_sides)} counted as train)" if self.unknown_sides else ""
        header = "" if self.skipped_lines else " without a header"
        return (
            f"separated by {SEPARATORS.get(self.separator, repr(self.separator))}{header}, pictures from column "
            f"{self.names[self.picture]}, captions from column{'s' * (len(self.captions) > 1)} {texts}{side}"
        )


def table_layout(path: Path, hints: Hints, side: int = UNSAID) -> Layout:
    """The layout of a table or token file. `side` applies to all its rows, if the file's location implies one."""
    lines = sample_lines(path)
    roots = candidate_roots(path.parent, hints.image_root)
    if hints.format == "flickr" or (hints.format is None and is_token_file(lines)):
        return Layout("flickr", "picture#number, a tab, the caption", lambda: _token_rows(path, side), [path], roots)
    columns = find_columns(path, lines, hints)
    format = {"\t": "tsv", "|": "pipe"}.get(columns.separator, "csv")
    return Layout(format, columns.words, lambda: _table_rows(path, columns, side), [path], roots)


# --- Flickr's token files -------------------------------------------------------------------------------------


def is_token_file(lines: Sequence[str]) -> bool:
    filled = [line for line in lines[:SAMPLE_ROWS] if line.strip()]
    return bool(filled) and sum(bool(_TOKEN_LINE.match(line)) for line in filled) > len(filled) / 2


def _token_rows(path: Path, side: int) -> Iterator[Row]:
    for line in read_lines(path):
        if match := _TOKEN_LINE.match(line.rstrip("\r\n")):
            yield Row(match[1], (match[2],), side)


# --- tables ---------------------------------------------------------------------------------------------------


def find_columns(path: Path, lines: Sequence[str], hints: Hints) -> Columns:
    """By the names in the header if they are known, otherwise by what the cells hold."""
    announced = _ANNOUNCED_SEPARATOR.match(lines[0]) if lines else None  # what Excel writes before the header
    filled = [line for line in lines[1 if announced else 0 :] if line.strip()]
    if not filled:
        raise DataError(f"{path} is empty", "a table needs one line per picture, with its path and its caption")
    separator = announced[1] if announced and not hints.separator else _separator(path, filled, hints)
    is_quoted = _is_quoted(filled, separator)
    sample = list(islice(_cells(filled, separator, is_quoted, path), SAMPLE_ROWS + 1))
    first = [cell.strip() for cell in sample[0]]
    has_header = not any(looks_like_picture(cell) for cell in first)
    names = first if has_header else [str(number) for number in range(1, len(first) + 1)]
    if len(names) < 2:
        raise DataError(
            f"{path} has a single column ({names[0][:60]!r}); expected a picture and a caption separated by "
            f"{repr(separator) if hints.separator else ', '.join(SEPARATORS.values())}",
            "set the separator with --separator CHARACTER",
        )
    body = [row for row in (sample[1:] if has_header else sample) if len(row) == len(names)]
    picture = _column("picture", hints.image_column, names, PICTURE_NAMES, "--image-column", path)
    if picture is None:
        picture = _picture_by_content(body, names)
    if picture is None:
        raise _no_column("picture", PICTURE_NAMES, names, "--image-column", path)
    captions = _caption_columns(hints.caption_column, names, path) or _caption_by_content(body, picture)
    if not captions:
        raise _no_column("caption", CAPTION_NAMES, names, "--caption-column", path)
    side = _known(names, SIDE_NAMES)
    words = {row[side].strip() for row in body} - {""} if side is not None else set()
    unknown = sorted(word for word in words if not side_of(word))
    if len(unknown) == len(words):  # the column has that name but means something else
        side, unknown = None, []
    skipped = int(has_header) + int(announced is not None)
    return Columns(separator, is_quoted, names, skipped, picture, captions, side, unknown[:5])


def _separator(path: Path, lines: Sequence[str], hints: Hints) -> str:
    """The one asked for, or the one that best splits the first lines into the same number of columns."""
    if hints.format in FORMAT_SEPARATORS:
        return FORMAT_SEPARATORS[hints.format]
    if hints.separator is not None:
        separator = SEPARATOR_WORDS.get(hints.separator, hints.separator)
        if len(separator) != 1:
            raise DataError(f"--separator {hints.separator!r} is not a single character", "use ',', '|' or tab")
        return separator

    def agreement(separator: str) -> tuple[float, bool]:
        is_quoted = _is_quoted(lines, separator)
        columns = len(next(_cells(lines[:1], separator, is_quoted, path)))
        rows = list(islice(_cells(lines, separator, is_quoted, path), 50))
        agreeing = sum(len(row) == columns for row in rows) / len(rows)
        return (agreeing if columns > 1 else 0.0, separator == "\t" and path.suffix == ".tsv")

    return max(SEPARATORS, key=agreement)


def _is_quoted(lines: Sequence[str], separator: str) -> bool:
    """Commas and semicolons need quoting, pipes never use it. With tabs, quotation marks count only if whole cells are
    quoted: otherwise one at the start of a caption would swallow the rows after it."""
    if separator != "\t":
        return separator != "|"
    cells = [cell for line in lines for cell in line.split(separator)]
    return any(len(cell) > 1 and cell.startswith('"') and cell.endswith('"') for cell in cells)


def _cells(lines: Iterable[str], separator: str, is_quoted: bool, path: Path) -> Iterator[list[str]]:
    """The cells of each row."""
    csv.field_size_limit(ROW_LIMIT_CHARACTERS)
    characters = 0  # since the last row: cells in quotation marks may go on over many lines

    def counted() -> Iterator[str]:
        nonlocal characters
        for line in lines:
            characters += len(line)
            if characters > ROW_LIMIT_CHARACTERS:
                problem = (
                    f"{path}: the row that ends in {line[:60]!r} has more than {ROW_LIMIT_CHARACTERS:,} characters"
                )
                raise DataError(problem, "look for a quotation mark that is never closed")
            yield line

    reader = csv.reader(counted(), delimiter=separator, quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE)
    try:
        for row in reader:
            characters = 0
            if row:
                yield row
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: {error}", "look for a quotation mark that is never closed"
        ) from None


def _table_rows(path: Path, columns: Columns, side: int) -> Iterator[Row]:
    width, picture, texts, side_column = len(columns.names), columns.picture, columns.captions, columns.side
    rows = _cells(read_lines(path), columns.separator, columns.is_quoted, path)
    for row in islice(rows, columns.skipped_lines, None):
        if len(row) != width:
            row = _mended(row, columns)
        captions = [caption for column in texts for caption in _captions_in(row[column])]
        own_side = side_of(row[side_column]) if side_column is not None else UNSAID
        yield Row(row[picture].strip(), captions, own_side or side)


def _mended(row: list[str], columns: Columns) -> list[str]:
    """A row with the wrong number of cells, repaired. Too long: the caption itself contains the separator. Too short:
    Flickr30k's results.csv has one row without a separator between the comment's number and the comment:
    `2199200615.jpg| 4   A dog runs across the grass .`"""
    width, (caption, *others) = len(columns.names), columns.captions
    surplus = len(row) - width
    if surplus > 0 and not others:
        after = caption + surplus + 1
        return [*row[:caption], columns.separator.join(row[caption:after]), *row[after:]]
    match = _NUMBER_THEN_TEXT.match(row[-1]) if surplus == -1 and caption == width - 1 else None
    return [*row[:-1], "", match[1]] if match else [*row, *[""] * -surplus][:width]


def _captions_in(cell: str) -> Sequence[str]:
    """One caption, or several from a JSON or Python list, as written by exports with several captions per picture."""
    if cell.startswith("[") and cell.endswith("]") and len(cell) < LIST_LIMIT_CHARACTERS:
        for parse in (json.loads, ast.literal_eval):
            try:
                several = parse(cell)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if several and isinstance(several, list) and all(isinstance(one, str) for one in several):
                return several
    return (cell,)


# --- which column is what -------------------------------------------------------------------------------------


def _known(names: Sequence[str], known: Sequence[str]) -> int | None:
    lowered = [name.lower() for name in names]
    return next((lowered.index(name) for name in known if name in lowered), None)


def _column(
    noun: str, asked: str | None, names: Sequence[str], known: Sequence[str], flag: str, path: Path
) -> int | None:
    if asked is None:
        return _known(names, known)
    lowered = [name.lower() for name in names]
    if asked.strip().lower() not in lowered:
        raise DataError(
            f"{path} has no column {asked!r} for the {noun}; it has {_listed(names)}", f"name one with {flag}"
        )
    return lowered.index(asked.strip().lower())


def _caption_columns(asked: str | None, names: Sequence[str], path: Path) -> list[int]:
    if asked is not None:
        columns = [_column("caption", part, names, (), "--caption-column", path) for part in asked.split(",")]
        return [column for column in columns if column is not None]
    known = _known(names, CAPTION_NAMES)
    if known is not None:
        return [known]
    return [number for number, name in enumerate(names) if _NUMBERED_CAPTION.match(name.lower())]


def _picture_by_content(rows: Sequence[Sequence[str]], names: Sequence[str]) -> int | None:
    """The column whose cells are mostly picture file names."""
    shares = [sum(looks_like_picture(row[column].strip()) for row in rows) for column in range(len(names))]
    best = max(range(len(names)), key=shares.__getitem__)
    return best if rows and shares[best] > len(rows) / 2 else None


def _caption_by_content(rows: Sequence[Sequence[str]], picture: int) -> list[int]:
    """The column with the most words, other than the picture's, if they look like sentences."""
    if not rows:
        return []
    columns = [column for column in range(len(rows[0])) if column != picture]
    words = {column: sum(len(re.findall(r"[^\W\d]+", row[column])) for row in rows) for column in columns}
    best = max(columns, key=words.__getitem__)
    return [best] if words[best] >= SENTENCE_WORDS * len(rows) else []


def _no_column(noun: str, known: Sequence[str], names: Sequence[str], flag: str, path: Path) -> DataError:
    return DataError(
        f"{path} has no {noun} column: looked for {', '.join(known[:12])}; found {_listed(names)}",
        f"name it with {flag} NAME",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:40] or "(no name)" for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
