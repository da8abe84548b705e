"""Scores of models as a table."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views import units

if TYPE_CHECKING:
    from clipctl.data.baseline import Baseline
    from clipctl.inference.comparison import Comparison
    from clipctl.inference.evaluation import Difference, ModelScores

SHOWN_CLASSES = 20
SIDES = (("i2t", "picture to caption"), ("t2i", "caption to picture"))


def parts(found: "Comparison") -> Iterator[Text]:
    yield plain(f"{found.data}: {found.pictures:,} pictures, {found.captions:,} captions")
    for one in found.models:
        if one.trained_on:
            yield training_line(one, found.pictures)
    yield plain("")
    yield recall_table(found.chance, found.models)
    yield baseline_line(found.baseline, found.scores)
    for other, gap in zip(found.models[1:], found.differences, strict=True):
        yield difference_line(found.scores, other, gap)
    yield plain("")
    yield other_table(found.models)
    yield calibration_line(found.scores)
    for one in found.models:
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


def training_line(one: "ModelScores", pictures: int) -> Text:
    were = "picture was" if one.trained_on == 1 else "pictures were"
    words = f"{one.trained_on:,} of {pictures:,} {were} in the training data of {one.name}: its scores are too high"
    return plain(words, style="yellow")


def baseline_line(baseline: "Baseline", one: "ModelScores") -> Text:
    if baseline.recall is None:
        return plain(f"no pixel baseline: {baseline.why}")
    verdict = "" if one.recalls["i2t_r1"] > baseline.recall else "; the model does worse than this baseline"
    share = units.percent(baseline.recall)
    return plain(f"baseline without training, nearest training picture by pixels: {share}{verdict}")


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
    words = f"temperature {found.temperature:.3f}: confidence {units.percent(found.sure)} on average, "
    words += f"accuracy {units.percent(found.right)} – {how}"
    if how != "calibrated":
        words += f"; {found.fitting_temperature:.3f} would calibrate it"
    return plain(words)


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
