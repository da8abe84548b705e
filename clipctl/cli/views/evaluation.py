"""Scores of models as a table."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views import units

if TYPE_CHECKING:
    from clipctl.inference.evaluation import Difference, ModelScores

SHOWN_CLASSES = 20
SIDES = (("i2t", "picture to caption"), ("t2i", "caption to picture"))


def parts(facts: dict[str, Any], found: "Sequence[ModelScores]", differences: "Sequence[Difference]") -> Iterator[Text]:
    yield plain(f"{facts['data']}: {facts['pictures']:,} pictures, {facts['captions']:,} captions")
    yield plain("")
    yield recall_table(facts["chance"], found)
    yield baseline_line(facts["baseline_r1"], found[0])
    for other, gap in zip(found[1:], differences, strict=True):
        yield difference_line(found[0], other, gap)
    yield plain("")
    yield other_table(found)
    yield calibration_line(found[0])
    for one in found:
        if one.zero_shot is not None:
            yield class_table(one)


def recall_table(chance: dict[str, float], found: "Sequence[ModelScores]") -> Text:
    rows: list[tuple[str, ...]] = [("model", "direction", "R@1", "95%", "R@5", "R@10", "median rank")]
    for one in found:
        for side, words in SIDES:
            low, high = one.intervals[f"{side}_r1"]
            recalls = [units.percent(one.recalls[f"{side}_r{k}"]) for k in (1, 5, 10)]
            between = f"{units.percent(low)} to {units.percent(high)}"
            rank = f"{one.recalls[f'{side}_median_rank']:g}"
            rows.append((one.name, words, recalls[0], between, *recalls[1:], rank))
    rows += [("guessing", words, units.percent(chance[f"{side}_r1"]), "", "", "", "") for side, words in SIDES]
    return aligned(rows)


def baseline_line(without: float | None, one: "ModelScores") -> Text:
    if without is None:
        return plain("no pixel baseline: these captions do not occur in training, or the training pictures are gone")
    verdict = "" if one.recalls["i2t_r1"] > without else "; the model does worse than this baseline"
    return plain(f"baseline without training, nearest training picture by pixels: {units.percent(without)}{verdict}")


def difference_line(first: "ModelScores", other: "ModelScores", gap: "Difference") -> Text:
    points = f"{100 * gap.value:+.1f} points of R@1 (95%: {100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    verdict = "significant at 95%" if gap.is_more_than_chance else "not significant at 95%"
    return plain(f"{first.name} against {other.name}: {points}, {verdict}")


def other_table(found: "Sequence[ModelScores]") -> Text:
    rows: list[tuple[str, ...]] = [
        ("model", "easy", "medium", "hard negatives", "modality gap", "zero-shot top-1", "top-5")
    ]
    for one in found:
        bands = [units.percent(value) if value is not None else "–" for value in one.difficulty]
        naming = [units.percent(value) for value in one.zero_shot[:2]] if one.zero_shot else ["–", "–"]
        rows.append((one.name, *bands, f"{one.modality_gap:.2f}", *naming))
    return aligned(rows)


def calibration_line(one: "ModelScores") -> Text:
    found = one.calibration
    how = "calibrated" if found.error < 0.05 else "overconfident" if found.sure > found.right else "underconfident"
    return plain(
        f"temperature {found.temperature:.3f}: confidence {units.percent(found.sure)} on average, "
        f"accuracy {units.percent(found.right)} – {how}; {found.fitting_temperature:.3f} would calibrate it"
    )


def class_table(one: "ModelScores") -> Text:
    """Classes by how often they are found, the rarest first."""
    assert one.zero_shot is not None
    worst = sorted(one.zero_shot.classes, key=lambda row: (row.top1, row.label))
    rows = [("class", "pictures", "top-1")]
    rows += [(row.label, f"{row.pictures:,}", units.percent(row.top1)) for row in worst[:SHOWN_CLASSES]]
    if len(worst) > SHOWN_CLASSES:
        rows.append((f"… {len(worst) - SHOWN_CLASSES} more, found more often; --json has them all", "", ""))
    table = Text("\n") + aligned(rows)
    if one.zero_shot.left_out:
        table += plain(f"\n{one.zero_shot.left_out:,} pictures belong to none of these classes and were left out")
    return table
