"""Captions in JSON: one object per line, COCO, Karpathy, and lists of objects as BLIP uses them. No torch."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipctl.data.formats.roots import candidate_roots
from clipctl.data.formats.rows import UNSAID, Hints, Layout, Row, side_of
from clipctl.data.formats.tables import CAPTION_NAMES, PICTURE_NAMES, SIDE_NAMES
from clipctl.data.formats.text import open_text, read_lines, sample_lines
from clipctl.errors import DataError
from clipctl.files import open_plain, parse_json

DOCUMENT_LIMIT_BYTES = 2**30  # COCO's largest caption file has 92 MB
BYTES_PER_VALUE = 6  # on average, at least: an entry takes some hundred bytes of memory, however little it says
SMALL_BYTES = 1_000_000  # where that does not matter
BLOCK_BYTES = 1 << 24
HOLE = bytes(4096)
LINE_HINT = 'expected lines such as {"file_name": "0001.jpg", "text": "a dog"}'
JSON_HINT = "copy or download it again if it is cut off; one object per line belongs in a .jsonl file"
STREAMED_HINT = "use a .jsonl file with one object per line, which is streamed"
DENSE_HINT = "captions are longer than that: check what the file holds"
COCO_HINT = 'expected images such as {"id": 1, "file_name": "1.jpg"} and annotations with image_id and caption'
KARPATHY_HINT = 'expected images such as {"filename": "1.jpg", "sentences": [{"raw": "a dog"}], "split": "train"}'


def lines_layout(path: Path, hints: Hints, side: int = UNSAID) -> Layout:
    """One JSON object per line."""
    head = sample_lines(path)
    first = next((line for line in head if line.strip()), "")
    try:
        item = parse_json(first)
    except ValueError:
        raise DataError(f"{path}: the first line is not JSON: {first[:60]!r}", LINE_HINT) from None
    picture, captions = _keys(item, hints, path)
    return Layout(
        "jsonl",
        f"JSON lines, pictures from {picture}, captions from {', '.join(captions)}",
        lambda: _line_rows(path, picture, captions, side),
        [path],
        candidate_roots(path.parent, hints.image_root),
    )


def document_layout(path: Path, hints: Hints, side: int = UNSAID) -> Layout:
    """One JSON document: COCO, Karpathy, or a list of objects."""
    document = _load(path)
    roots = candidate_roots(path.parent, hints.image_root)
    if is_coco(document):
        words = "COCO captions, pictures from images.file_name, captions from annotations.caption"
        return Layout("coco", words, lambda: _coco_rows(path, document, side), [path], roots)
    if is_karpathy(document):
        words = "Karpathy's JSON, pictures from images.filename, captions from sentences.raw, split from images.split"
        return Layout("karpathy", words, lambda: _karpathy_rows(path, document), [path], roots)
    items = _items(document)
    if not items or not isinstance(items[0], dict):
        raise DataError(
            f"{path} has an unknown JSON layout: {_shape(document)}; expected COCO (images and annotations), "
            "Karpathy (images with sentences), or a list of objects with a picture and a caption",
            "clipctl data inspect --help lists the formats; a .jsonl file with one object per line works too",
        )
    picture, captions = _keys(items[0], hints, path)
    return Layout(
        "json",
        f"a list of objects, pictures from {picture}, captions from {', '.join(captions)}",
        lambda: (_row(item, picture, captions, side) for item in items if isinstance(item, dict)),
        [path],
        roots,
    )


def is_coco(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("images"), list)
        and isinstance(annotations := document.get("annotations"), list)
        and any(isinstance(item, dict) and "caption" in item for item in annotations[:100])
    )


def is_karpathy(document: Any) -> bool:
    images = document.get("images") if isinstance(document, dict) else None
    return isinstance(images, list) and any(isinstance(item, dict) and "sentences" in item for item in images[:100])


def _load(path: Path) -> Any:
    _check_density(path)
    try:
        with open_text(path) as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        words = error.msg if isinstance(error, json.JSONDecodeError) else "unreadable"
        raise DataError(f"{path}{where} is not valid JSON: {words}", JSON_HINT) from None


def _check_density(path: Path) -> None:
    """A document is read as a whole. One that is nothing but brackets takes thirty times its size in memory, and one
    that is mostly a hole in the file takes as much as somebody wished."""
    size_bytes, values = 0, 0
    with open_plain(path, follows_links=True) as file:
        if os.fstat(file.fileno()).st_size > DOCUMENT_LIMIT_BYTES:
            raise DataError(f"{path} is larger than {DOCUMENT_LIMIT_BYTES // 2**30} GiB", STREAMED_HINT)
        while block := file.read(BLOCK_BYTES):
            if HOLE in block:
                raise DataError(f"{path} is not valid JSON: it has {len(HOLE):,} zero bytes in a row", JSON_HINT)
            size_bytes += len(block)
            values += sum(map(block.count, (b",", b"{", b"[")))
            if size_bytes > SMALL_BYTES and values * BYTES_PER_VALUE > size_bytes:
                raise DataError(f"{path} has {values:,} values in its first {size_bytes:,} bytes", DENSE_HINT)


def _items(document: Any) -> list[Any]:
    """The list of objects, which may be under `data`."""
    items = document.get("data") if isinstance(document, dict) else document
    return items if isinstance(items, list) else []


def _shape(document: Any) -> str:
    if isinstance(document, dict):
        return f"an object with {', '.join(str(key)[:40] for key in list(document)[:8]) or 'nothing in it'}"
    if isinstance(document, list) and document:
        return f"a list of {len(document)} items, the first of which is {_shape(document[0])}"
    return "an empty list" if document == [] else f"a value of type {type(document).__name__}"


# --- rows -----------------------------------------------------------------------------------------------------


def _line_rows(path: Path, picture: str, captions: Sequence[str], side: int) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except ValueError:
            raise DataError(f"{path}, line {number} is not JSON: {line[:60]!r}", LINE_HINT) from None
        if isinstance(item, dict):
            yield _row(item, picture, captions, side)


def _row(item: Mapping[str, Any], picture: str, captions: Sequence[str], side: int) -> Row:
    own_side = next((side_of(item[name]) for name in SIDE_NAMES if name in item), UNSAID)
    texts = [text for caption in captions for text in texts_in(item.get(caption))]
    return Row(_path(item.get(picture)), texts, own_side or side)


def texts_in(value: Any) -> list[str]:
    """Captions in any of their JSON forms: a string, a list of strings, or objects with `raw` or `caption`."""
    values = value if isinstance(value, list) else [value]
    found = (one.get("raw", one.get("caption")) if isinstance(one, dict) else one for one in values)
    return [one for one in found if isinstance(one, str)]


def _path(value: Any) -> str:
    """The path in a picture field; Hugging Face datasets may have an object with `path` there."""
    if isinstance(value, dict):
        value = value.get("path")
    return value.strip() if isinstance(value, str) else ""


def _coco_rows(path: Path, document: Any, side: int) -> Iterator[Row]:
    captions: defaultdict[str, list[str]] = defaultdict(list)
    for item in document["annotations"]:
        if isinstance(item, dict) and isinstance(item.get("caption"), str):
            if "image_id" not in item:
                raise DataError(f"{path}: annotation without image_id: {str(item)[:80]}", COCO_HINT)
            captions[str(item["image_id"])].append(item["caption"])
    for image in document["images"]:
        if not isinstance(image, dict) or not isinstance(image.get("file_name"), str) or "id" not in image:
            raise DataError(f"{path}: image without file_name or id: {str(image)[:80]}", COCO_HINT)
        yield Row(image["file_name"], captions.pop(str(image["id"]), ()), side)


def _karpathy_rows(path: Path, document: Any) -> Iterator[Row]:
    for image in document["images"]:
        if not isinstance(image, dict) or not isinstance(image.get("filename"), str):
            raise DataError(f"{path}: image without filename: {str(image)[:80]}", KARPATHY_HINT)
        folder = image.get("filepath")
        name = f"{folder}/{image['filename']}" if isinstance(folder, str) and folder else image["filename"]
        yield Row(name, texts_in(image.get("sentences")), side_of(image.get("split")))


def _keys(item: Any, hints: Hints, path: Path) -> tuple[str, list[str]]:
    """The keys of an object that hold the picture and the captions."""
    if not isinstance(item, dict):
        raise DataError(f"{path}: the first entry is {_shape(item)}, not an object", LINE_HINT)
    lowered = {str(key).lower(): str(key) for key in item}

    def find(noun: str, asked: str | None, known: Sequence[str], flag: str) -> str:
        wanted = [asked.strip().lower()] if asked else known
        for name in wanted:
            if name in lowered:
                return lowered[name]
        raise DataError(
            f"{path} has no key for the {noun}: looked for {', '.join(wanted[:12])}; found "
            f"{', '.join(str(key)[:40] for key in list(item)[:12]) or 'an empty object'}",
            f"name it with {flag} NAME",
        )

    picture = find("picture", hints.image_column, PICTURE_NAMES, "--image-column")
    asked = hints.caption_column.split(",") if hints.caption_column else [None]
    return picture, [find("caption", one, CAPTION_NAMES, "--caption-column") for one in asked]
