"""From the words a user types to the pairs they mean."""

from typing import NamedTuple

from clipctl.config import DataConfig, parse_count
from clipctl.data.loader import Source
from clipctl.data.sources.synthetic import SyntheticSource
from clipctl.errors import DataError

DEFAULT_SYNTHETIC_PAIRS = 240
MAX_SYNTHETIC_PAIRS = 100_000  # there are 10,368 combinations; more pairs only repeat them in other shades
MIN_PAIRS = 2  # on each side: with one pair there is nothing to confuse it with


class Split(NamedTuple):
    train: Source
    val: Source


def open_data(config: DataConfig) -> Split:
    """The training and held-out pairs of `synthetic` or `synthetic:PAIRS`."""
    name, _, count_text = config.source.partition(":")
    if name != "synthetic":
        raise DataError(
            f"{config.source!r} is no dataset that this version reads",
            "it trains on its built-in pictures: synthetic, or synthetic:5000 for more",
        )
    try:
        pairs = parse_count(count_text) if count_text else DEFAULT_SYNTHETIC_PAIRS
    except ValueError as error:
        raise DataError(f"the number of pairs in {config.source!r} must be {error}", "synthetic:5000") from None
    if not 1 <= pairs <= MAX_SYNTHETIC_PAIRS:
        raise DataError(f"{config.source!r} asks for {pairs} pairs; 1 to {MAX_SYNTHETIC_PAIRS:,} can be drawn")
    val_pairs = round(pairs * config.val_fraction)
    if val_pairs < MIN_PAIRS or pairs - val_pairs < MIN_PAIRS:
        raise DataError(
            f"{config.source!r} with data.val_fraction {config.val_fraction:g} leaves {pairs - val_pairs} pairs "
            f"to train on and {val_pairs} to test with; {MIN_PAIRS} of each is the least",
            "ask for more pairs, such as synthetic:240",
        )
    return Split(
        SyntheticSource(pairs - val_pairs, seed=config.seed, validation=False),
        SyntheticSource(val_pairs, seed=config.seed, validation=True),
    )
