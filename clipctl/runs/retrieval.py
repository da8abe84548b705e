"""What a run finds for a dozen captions that it was never trained on. The trainer replaces the file at each evaluation.

retrieval.json    step, candidates, side_px, and for each caption where its picture stands among all, where it stood
                  before, and the three pictures that come first
thumbnails.bin    held-out pictures in their order, side_px × side_px × 3 bytes each, written once
"""

import math
from dataclasses import dataclass
from typing import Any

CAPTIONS, NEAREST = 12, 3  # that are written
MOST_CAPTIONS, MOST_NEAREST = 24, 5  # that are read
SIDE_PX = 16
MOST_THUMBNAILS = 4096


@dataclass(frozen=True)
class Near:
    picture: int  # its number among the held-out ones
    score: float  # cosine
    is_right: bool


@dataclass(frozen=True)
class Query:
    caption: str
    rank: int  # of its picture among all, the best being 1
    before: int | None  # the rank at the evaluation before, if there was one
    nearest: tuple[Near, ...]

    @property
    def top_score(self) -> float:
        return max((one.score for one in self.nearest), default=0.0)

    @property
    def moved(self) -> int:
        """Places gained since the previous evaluation."""
        return 0 if self.before is None else self.before - self.rank


@dataclass(frozen=True)
class Retrieval:
    step: int
    candidates: int
    queries: tuple[Query, ...]

    @property
    def pictures(self) -> set[int]:
        """All that were found."""
        return {near.picture for query in self.queries for near in query.nearest}

    def after(self, earlier: "Retrieval | None") -> "Retrieval":
        """The same, with the rank of each caption's picture at an earlier evaluation."""
        ranks = {query.caption: query.rank for query in earlier.queries} if earlier else {}
        queries = (Query(one.caption, one.rank, ranks.get(one.caption), one.nearest) for one in self.queries)
        return Retrieval(self.step, self.candidates, tuple(queries))

    def ordered(self) -> list[Query]:
        """The best found first: by rank, then by how clearly."""
        return sorted(self.queries, key=lambda query: (query.rank, -query.top_score))

    def to_dict(self) -> dict[str, Any]:
        # Not `asdict`: it copies every value, and takes longer than writing the file.
        queries = [{**vars(query), "nearest": [vars(one) for one in query.nearest]} for query in self.queries]
        return {"step": self.step, "candidates": self.candidates, "queries": queries, "side_px": SIDE_PX}

    @classmethod
    def from_dict(cls, document: Any) -> "Retrieval | None":
        """What `to_dict` wrote; None if it is anything else. Surplus captions are cut off."""
        try:
            queries = [_query(one) for one in document["queries"][:MOST_CAPTIONS]]
            return cls(_count(document["step"]), _count(document["candidates"]), tuple(queries))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None


def _query(values: dict[str, Any]) -> Query:
    caption, before = values["caption"], values["before"]
    if not isinstance(caption, str):
        raise ValueError(f"a caption is {type(caption).__name__}")
    nearest = [_near(one) for one in values["nearest"][:MOST_NEAREST]]
    return Query(caption[:1000], _count(values["rank"]), None if before is None else _count(before), tuple(nearest))


def _near(values: dict[str, Any]) -> Near:
    score = values["score"]
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ValueError(f"a score is {str(score)[:40]}")
    return Near(_count(values["picture"]), float(score), values["is_right"] is True)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**50:
        raise ValueError(f"not a count: {str(value)[:40]}")
    return value
