"""Displays a recommendation."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from clipctl.bench.recommend import Candidate, Recommendation
from clipctl.bench.scaling import PAIRS_EACH, Scale
from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.model.forecast import Estimate


def show(answer: Recommendation) -> None:
    output.show_parts(parts(answer))


def parts(answer: Recommendation) -> Iterator[Text]:
    headline = answer.device or "nothing fits"
    yield output.plain(headline, style="bold green" if answer.device else "bold red") + output.plain(
        f" – {answer.reason} (confidence: {answer.confidence})"
    )
    yield Text("")
    yield _candidate_table(answer)
    if any(one.simulated for one in answer.candidates):
        yield output.plain("* simulated")
    for one in answer.candidates:
        yield output.plain(_memory_words(one))
    yield Text("")
    yield _band_table(answer)
    yield Text("")
    for number, line in enumerate(answer.assumptions):
        yield output.plain(f"{'assumed' if number == 0 else '':<9}{line}")


def show_scaling(scales: Sequence[Scale], nodes: int, bandwidth: str) -> None:
    """Several machines, up to `nodes`: how much faster, and at what price."""
    output.show_parts(_scaling_parts(scales, nodes, bandwidth))


def _scaling_parts(scales: Sequence[Scale], nodes: int, bandwidth: str) -> Iterator[Text]:
    yield Text("")
    if not scales:
        yield output.plain("several machines: unknown until a device is measured here; run clipctl bench")
        return
    rows = [("machines", "pairs each", "step", "communicating", "efficiency", "epoch", "price", "")]
    for one in scales:
        rows.append(
            (
                str(one.nodes),
                str(one.pairs),
                _interval(one.step_s),
                f"{one.communication_s / one.step_s.value:.0%}",
                f"{one.efficiency:.0%}",
                units.duration(one.epoch_s),
                "–" if one.price is None else f"{one.price:,.2f}",
                "",
            )
        )
    yield output.aligned(rows)
    yield output.plain(f"machines like this one, {bandwidth} between them; forecast")
    if scales[-1].nodes < nodes:
        words = f"{nodes} machines need --batch-size {PAIRS_EACH * nodes} or more: {PAIRS_EACH} pairs each"
        yield output.plain(words, style="yellow")


def _candidate_table(answer: Recommendation) -> Text:
    rows = [("device", "fits", "needs", "has", "step", "epoch", "max batch", "basis")]
    for one in answer.candidates:
        step = one.ranked.step_s
        epoch = step.scaled(answer.steps_per_epoch).value if step else None
        rows.append(
            (
                f"{one.device} {one.ranked.setting.precision}{'*' if one.simulated else ''}",
                "yes" if one.ranked.fits else "no",
                units.size(one.ranked.need_bytes),
                units.size(one.ranked.available_bytes),
                _interval(step),
                "–" if epoch is None else units.duration(epoch),
                str(one.largest_batch) if one.largest_batch else "none",
                units.basis(step.basis) if step else "unknown",
            )
        )
    return output.aligned(rows)


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    share = estimate.high / estimate.value - 1
    if share >= 1:  # as ± it would reach below nothing
        return f"{units.seconds(estimate.low)} to {units.seconds(estimate.high)}"
    return f"{units.seconds(estimate.value)} ± {max(1, round(100 * share))}%"


def _memory_words(one: Candidate) -> str:
    parts = {
        "weights": one.ranked.memory.weights_bytes,
        "gradients": one.ranked.memory.gradients_bytes,
        "optimizer": one.ranked.memory.optimizer_bytes,
        "activations": one.ranked.memory.activations_bytes,
        "batch": one.ranked.memory.batch_bytes,
        "program": one.ranked.memory.process_bytes,
        "margin": one.margin_bytes,
    }
    words = ", ".join(f"{name} {units.size(count)}" for name, count in parts.items() if count)
    return f"memory on {one.device} ({units.basis(one.ranked.memory_basis)}): {words}"


def _band_table(answer: Recommendation) -> Text:
    devices = [one.device for one in answer.candidates]
    steps = (f"{device}, step" for device in devices)
    rows = [("what would change it", "parameters", *steps, "fastest", "rule of thumb")]
    for band in answer.bands:
        steps = ("–" if (one := band.step_s[device]) is None else f"{units.seconds(one.value)}" for device in devices)
        rows.append((f"{band.name}", band.range, *steps, band.fastest or "–", band.rule_of_thumb))
    return output.aligned(rows)
