"""Opens the data that a user names on the command line or in a config."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from clipctl.config.quantities import parse_count
from clipctl.config.sections import DataConfig, is_synthetic
from clipctl.data.bad import check_bad
from clipctl.data.formats.rows import TRAIN, Hints
from clipctl.data.index.columns import Index, skipped_words
from clipctl.data.index.source import IndexedSource
from clipctl.data.index.store import open_index
from clipctl.data.sampling import MIN_PAIRS
from clipctl.data.source import Source
from clipctl.data.split import Leakage, divide, find_leakage, own_sides
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.errors import DataError
from clipctl.progress import Tell, silent

DEFAULT_SYNTHETIC_PAIRS = 240
MAX_SYNTHETIC_PAIRS = 100_000  # there are 10,368 combinations; more pairs only repeat them in other shades


@dataclass(frozen=True)
class Data:
    """Both splits, how the data were understood, and what was noticed while reading them."""

    train: Source
    val: Source
    words: tuple[str, ...]  # a description of each source
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=(), repr=False)  # labels of missing pictures

    @property
    def pictures(self) -> int:
        """All pictures the data name, missing ones included."""
        return len(self.train) + len(self.val) + len(self.missing)


def open_data(config: DataConfig, tell: Tell = silent) -> Data:
    """The training and held-out pairs of a config. Raises DataError if there are too few or too many are missing."""
    data = read_data(config, tell)
    if problem := too_few_pairs(data, config):
        raise problem
    check_bad(dict.fromkeys(data.missing, "missing"), data.pictures, config.max_bad)
    return data


def too_few_pairs(data: Data, config: DataConfig) -> DataError | None:
    """The error if there is nothing to contrast with on one of the two sides."""
    train, val = len(data.train), len(data.val)
    if min(train, val) >= MIN_PAIRS:
        return None
    if data.train.is_drawn:
        hint = f"ask for more pairs, e.g. synthetic:{DEFAULT_SYNTHETIC_PAIRS}"
    elif train + val < 2 * MIN_PAIRS:
        hint = f"add pictures with captions: at least {2 * MIN_PAIRS} in all"
    else:
        share = 0.3 if round(0.3 * (train + val)) >= MIN_PAIRS else 0.5
        hint = f"use --val-fraction {share} or --val DATA"
    return DataError(
        f"{' + '.join(config.source)!r} with data.val_fraction {config.val_fraction:g} gives {train:,} training pairs "
        f"and {val:,} held-out pairs; at least {MIN_PAIRS} of each are needed",
        hint,
    )


def read_data(config: DataConfig, tell: Tell = silent) -> Data:
    """Like `open_data`, but without the checks."""
    if any(is_synthetic(source) for source in config.source):
        return _read_synthetic(config)
    return _read_files(config, tell)


# --- drawn ----------------------------------------------------------------------------------------------------


def _read_synthetic(config: DataConfig) -> Data:
    """`synthetic` or `synthetic:PAIRS`."""
    if len(config.source) > 1 or config.val is not None:
        raise DataError("synthetic cannot be combined with other data", "pass either synthetic or your own data")
    source = config.source[0]
    count_text = source.partition(":")[2]
    try:
        pairs = parse_count(count_text) if count_text else DEFAULT_SYNTHETIC_PAIRS
    except ValueError as error:
        raise DataError(f"the number of pairs in {source!r} must be {error}", "for example synthetic:5000") from None
    if not 1 <= pairs <= MAX_SYNTHETIC_PAIRS:
        raise DataError(
            f"{source!r} asks for {pairs:,} pairs; it must be between 1 and {MAX_SYNTHETIC_PAIRS:,}",
            "for example synthetic:5000",
        )
    val_pairs = min(round(pairs * config.val_fraction), config.val_limit)
    return Data(
        SyntheticSource(pairs - val_pairs, seed=config.seed, validation=False),
        SyntheticSource(val_pairs, seed=config.seed, validation=True),
        ("drawn scenes",),
    )


# --- from files -----------------------------------------------------------------------------------------------


def hints_of(config: DataConfig) -> Hints:
    return Hints(
        format=config.format,
        image_column=config.image_column,
        caption_column=config.caption_column,
        image_root=config.image_root,
        separator=config.separator,
        template=config.template,
    )


def _read_files(config: DataConfig, tell: Tell) -> Data:
    hints = hints_of(config)
    parts = [open_index(source, hints, tell) for source in config.source]
    missing: list[str] = []
    source = present(IndexedSource.whole(parts, _name(config.source)), missing)
    if config.val is None:
        train, val, unused = divide(source, config.val_fraction, config.val_limit, config.seed)
    else:
        parts.append(open_index(config.val, hints, tell))
        train, own, unused = own_sides(source)
        unused += len(own)
        whole = present(IndexedSource.whole(parts[-1:], config.val), missing)
        held_out = own_sides(whole)
        val = held_out.val if len(held_out.val) else whole
    notes = [note for part in parts for note in _notes(part)]
    if unused:
        notes.append(
            f"{unused:,} pictures in the data's own {'test' if config.val is None else 'other'} split are not used"
        )
    if len(val) > config.val_limit:
        notes.append(f"{config.val_limit:,} of {len(val):,} held-out pictures are used (data.val_limit)")
        val = val.thinned(config.val_limit)
    words = [_words(part) for part in parts]
    if config.val is not None:
        words[-1] = f"held out: {words[-1]}"
    return Data(train, val, tuple(words), tuple(notes), tuple(missing))


def open_held_out(config: DataConfig, tell: Tell = silent) -> Source:
    """All pictures of `config.source`, to judge a model by; of data with a split of their own, the held-out ones."""
    if any(is_synthetic(source) for source in config.source):
        return _read_synthetic(config).val
    parts = [open_index(source, hints_of(config), tell) for source in config.source]
    whole = present(IndexedSource.whole(parts, _name(config.source)), [])
    held_out = own_sides(whole).val
    return held_out if len(held_out) else whole


def is_classes(source: Source) -> bool:
    """Whether the data are class folders, in which equal captions are normal."""
    return isinstance(source, IndexedSource) and all(part.facts.format == "classes" for part in source.parts)


def class_names(source: Source, template: str) -> list[str] | None:
    """The class of each picture, if the data are class folders: what the template was filled with."""
    if not is_classes(source):
        return None
    before, _, after = template.partition("{}")
    captions = (source.caption(index, 0) for index in range(len(source)))
    return [caption.removeprefix(before).removesuffix(after) for caption in captions]


def present(source: IndexedSource, missing: list[str]) -> IndexedSource:
    """The source without its missing pictures, whose labels are added to `missing`."""
    if not any(part.facts.missing for part in source.parts):
        return source
    absent = np.flatnonzero(source.sizes < 0)
    missing += [source.label(int(index)) for index in absent]
    return source.without(absent)


def leakage_of(train: Source, val: Source) -> Leakage:
    """Synthetic data have none: their splits share no combination."""
    if not isinstance(train, IndexedSource) or not isinstance(val, IndexedSource):
        return Leakage(0, 0)
    return find_leakage(train, val)


def without_shared(train: Source, val: Source) -> Source:
    """The training pictures that are not held out as well."""
    if not isinstance(train, IndexedSource) or not isinstance(val, IndexedSource):
        return train
    return train.without(np.flatnonzero(np.isin(train.picture_keys, val.picture_keys)))


def leakage_notes(leakage: Leakage, *, of_classes: bool = False) -> list[str]:
    """What to warn about; classes have the same captions on both sides, as they should."""
    notes = []
    if leakage.pictures:
        are = "picture is" if leakage.pictures == 1 else "pictures are"
        notes.append(f"{leakage.pictures:,} held-out {are} also in the training set: scores will look too good")
    if leakage.captions and not of_classes:
        belong = "caption also belongs" if leakage.captions == 1 else "captions also belong"
        notes.append(f"{leakage.captions:,} held-out {belong} to training pictures")
    return notes


def _name(sources: tuple[str, ...]) -> str:
    return " + ".join(os.path.basename(source.rstrip("/")) or source for source in sources)


def _words(part: Index) -> str:
    facts = part.facts
    words = f"{facts.format}: {facts.words}"
    if any(facts.side_counts[TRAIN:]):
        names = zip(("train", "val", "test"), facts.side_counts[TRAIN:], strict=True)
        words += f"; split as given: {', '.join(f'{count:,} {name}' for name, count in names if count)}"
    if facts.sharded or facts.roots == [facts.source]:
        return words
    return f"{words}; pictures in {', '.join(_short(root, facts.source) for root in facts.roots)}"


def _short(place: str, source: str) -> str:
    """A directory, relative to the data if it is below them."""
    base = source if os.path.isdir(source) else os.path.dirname(source)
    try:
        relative = Path(place).relative_to(base).as_posix()
    except ValueError:
        return place
    return "the same directory" if relative == "." else relative


def _notes(part: Index) -> list[str]:
    return [*part.facts.notes, *(f"{words}: skipped" for words in skipped_words(part.facts.skipped))]
