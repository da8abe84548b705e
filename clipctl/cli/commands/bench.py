"""clipctl bench"""

from pathlib import Path
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.errors import ConfigError, ConfigErrors
from clipctl.files import check_parent

if TYPE_CHECKING:
    from clipctl.bench.measure import BenchRequest

FORMATS = ("table", "md", "csv", "json")
PICTURES = (".png", ".svg")
DEFAULT_BATCH_SIZES = (8,)
STEP_FLAGS = {"--batch-sizes": "--batch-sizes 8 16", "--micro-batch": "--batch-sizes 64 --micro-batch 8"}


def bench(
    sizes: options.Sizes = None,
    suites: options.Suites = None,
    model: options.Models = None,
    batch_sizes: options.BatchSizes = None,
    micro_batch: options.MicroBatches = None,
    devices: options.Devices = None,
    dtypes: options.Dtypes = None,
    threads: options.ThreadCounts = None,
    format: options.Format = "table",
    save: options.Save = None,
    compare: options.Compare = None,
    plot: options.Plot = None,
    json: options.Json = False,
) -> None:
    """Measure how fast this machine is: operations, precisions, threads, training steps."""
    if json:
        format = "json"
    check_output(format, save, plot)
    from clipctl.bench import results

    before = results.load_result(compare) if compare else None
    request = parse_request(sizes, suites, model, batch_sizes, micro_batch, devices, dtypes, threads)

    from clipctl.bench import measure
    from clipctl.cli.views import bench as view

    if plot:
        from clipctl.bench import plot as plotting

        plotting.require_matplotlib()
    from clipctl.hardware.processes import interrupts_raised

    with output.saying("measuring") as tell, interrupts_raised():
        result = measure.bench(request, tell)
    view.show(result, format)
    if before is not None:
        view.show_comparison(result, before)
    if save:
        results.save_result(result, save)
    if plot:
        plotting.draw(result, plot)


def check_output(format: str, save: Path | None, plot: Path | None) -> None:
    """Check the output options before anything is measured."""
    if format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}")
    if plot and plot.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {plot} is neither a .png nor an .svg file")
    for path in (save, plot):
        if path:
            check_parent(path)


def parse_request(
    sizes: list[str] | None,
    suites: list[str] | None,
    models: list[str] | None,
    batch_sizes: list[str] | None,
    micro_batches: list[str] | None,
    devices: list[str] | None,
    dtypes: list[str] | None,
    threads: list[str] | None,
) -> "BenchRequest":
    """Check the options; all mistakes are reported at once."""
    problems: list[ConfigError] = []
    given = {"--sizes": sizes, "--batch-sizes": batch_sizes, "--micro-batch": micro_batches, "--threads": threads}
    counts = {flag: _counts(flag, texts, problems) for flag, texts in given.items()}
    known_presets, known_dtypes, known_suites = _known()
    names = {
        "--suites": _names("--suites", suites, known_suites, problems),
        "--model": _names("--model", models, known_presets, problems),
        "--dtypes": _names("--dtypes", dtypes, known_dtypes, problems),
    }
    for flag, example in STEP_FLAGS.items():
        if given[flag] and not models:
            problems.append(ConfigError(f"{flag} needs --model", f"for example --model tiny {example}"))
    if problems:
        raise ConfigErrors(problems)
    batch_counts, micro_counts = counts["--batch-sizes"] or DEFAULT_BATCH_SIZES, counts["--micro-batch"] or ()
    _check_parts(batch_counts, micro_counts)

    from clipctl.bench.measure import DEFAULT_SIZES, BenchRequest
    from clipctl.bench.steps import CALIBRATION, StepProbe

    chosen = names["--suites"]
    if chosen is None:  # --sizes counts elements, so it implies the operations; --model implies training steps
        micro, steps = known_suites[:-1], known_suites[-1:]
        chosen = steps if models and not sizes else micro if sizes and not models else known_suites
    return BenchRequest(
        sizes=counts["--sizes"] or DEFAULT_SIZES,
        suites=chosen,
        devices=tuple(part for text in devices for part in text.split(",") if part) if devices else None,
        dtypes=names["--dtypes"] or known_dtypes,
        threads=counts["--threads"],
        groups=tuple(
            (StepProbe(preset, batch_size, micro_batch=micro_batch),)
            for preset in names["--model"] or ()
            for batch_size in batch_counts
            for micro_batch in micro_counts or (None,)
        )
        or CALIBRATION,
        step_dtypes=names["--dtypes"] or ("fp32",) if models else known_dtypes,
    )


def _known() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    from clipctl.bench.results import SUITES
    from clipctl.config.presets import PRESETS
    from clipctl.config.sections import PRECISIONS

    return tuple(PRESETS), PRECISIONS, SUITES


def _counts(flag: str, texts: list[str] | None, problems: list[ConfigError]) -> tuple[int, ...] | None:
    from clipctl.config.quantities import parse_counts

    if not texts:
        return None
    try:
        return tuple(parse_counts(texts))
    except (ValueError, OverflowError) as error:
        problems.append(ConfigError(f"{flag} must be {error}, got {' '.join(texts)!r}"))
        return None


def _check_parts(batch_sizes: tuple[int, ...], micro_batches: tuple[int, ...]) -> None:
    largest, smallest = max(micro_batches, default=0), min(batch_sizes)
    if largest > smallest:
        hint = "a micro-batch is a part of a batch: choose a smaller one, or larger --batch-sizes"
        raise ConfigError(f"--micro-batch {largest} is larger than a batch of {smallest}", hint)


def _names(
    flag: str, texts: list[str] | None, known: tuple[str, ...], problems: list[ConfigError]
) -> tuple[str, ...] | None:
    if not texts:
        return None
    asked = [part for text in texts for part in text.split(",") if part]
    problems += [ConfigError(f"{flag} {one!r} is not one of {', '.join(known)}") for one in asked if one not in known]
    return tuple(one for one in known if one in asked)
