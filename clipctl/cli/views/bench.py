"""Displays benchmark results: as tables, Markdown, CSV or JSON."""

import csv
import sys
from collections.abc import Iterator

from rich.text import Text

from clipctl.bench.results import BenchResult, BenchRow, compare
from clipctl.bench.verdict import verdict_of
from clipctl.cli import output
from clipctl.cli.views import units


def show(result: BenchResult, format: str) -> None:
    match format:
        case "json":
            verdict = verdict_of(result)
            document = {**result.to_dict(), "verdict": verdict.to_dict() if verdict else None}
            output.print_json("bench", {key: value for key, value in document.items() if key != "schema"})
        case "csv":
            write_csv(result)
        case "md":
            for line in markdown(result):
                output.data().print(output.plain(line), soft_wrap=True)
        case _:
            output.show_parts(tables(result))


def size_name(size: int) -> str:
    """1e6, 2.6e5, 4096."""
    if size < 10_000:
        return str(size)
    text = f"{size:.1e}".replace("e+0", "e").replace("e+", "e")
    return text.replace(".0e", "e")


STEP_NAME_WIDTH = 12  # what the figures leave of 80 columns
COLUMNS = ("operation", "size", "on", "median", "±", "GFLOP/s", "GB/s", "roof", "bound")


def cells(row: BenchRow) -> tuple[str, ...]:
    return (
        row.operation,
        size_name(row.size),
        row.setting,
        units.seconds(row.median_s),
        units.percent(row.iqr_s / row.median_s),
        _number(row.gflops),
        _number(row.gbytes_per_s),
        units.percent(row.roof_share),
        row.bound or "–",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def tables(result: BenchResult) -> Iterator[Text]:
    """Tables that fit 80 columns."""
    yield output.plain(result.machine.title, style="bold")
    for part in (_peak_lines(result), _operation_table(result), _step_table(result), _overhead_lines(result)):
        if part:
            yield Text("")
            yield part
    yield Text("")
    yield from (output.plain(line) for line in findings(result))
    for line in (*(f"skipped {line}" for line in result.skipped), *(f"warning: {line}" for line in result.warnings)):
        yield output.plain(line, style="yellow")
    yield output.plain(f"took {result.seconds:.0f} s")
    if verdict := verdict_of(result):
        yield Text("")
        yield output.plain(verdict.words, style="bold")


def _peak_lines(result: BenchResult) -> Text | None:
    lines = []
    for device in dict.fromkeys(peak.device for peak in result.peaks):
        peaks = [peak for peak in result.peaks if peak.device == device]
        products = ", ".join(f"{_number(peak.gflops)} in {peak.dtype}" for peak in peaks)
        memory = f"; memory {_number(peaks[0].gbytes_per_s)} GB/s"
        lines.append(f"{device} peak: GFLOP/s {products}{memory}")
    return Text("\n").join(output.plain(line) for line in lines) if lines else None


def _operation_table(result: BenchResult) -> Text | None:
    rows = [row for row in result.results if row.suite != "step"]
    styles = ["bold", *("yellow" if row.is_noisy else "" for row in rows)]
    return output.aligned([COLUMNS, *(cells(row) for row in rows)], styles) if rows else None


def _step_table(result: BenchResult) -> Text | None:
    rows = [row for row in result.results if row.suite == "step"]
    if not rows:
        return None
    lines: list[tuple[str, ...]] = [("step", "batch", "on", "median", "±", "pairs/s", "GFLOP/s", "peak memory")]
    styles = ["bold"]
    for row in rows:
        shown = _step_lines(row)
        lines += shown
        styles += ["yellow" if row.is_noisy else ""] * len(shown)
    return output.aligned(lines, styles)


def _step_lines(row: BenchRow) -> list[tuple[str, ...]]:
    """A step's figures beside its name, or below it if the name is long."""
    figures = (
        str(row.size),
        row.setting,
        units.seconds(row.median_s),
        units.percent(row.iqr_s / row.median_s),
        _number(row.size / row.median_s),
        _number(row.gflops),
        "–" if row.peak_bytes is None else units.size(row.peak_bytes),
    )
    is_long = len(row.operation) > STEP_NAME_WIDTH
    return [(row.operation,), ("", *figures)] if is_long else [(row.operation, *figures)]


def _overhead_lines(result: BenchResult) -> Text | None:
    if not result.overheads:
        return None
    names = {
        "initialisation": "init_s",
        "first call": "first_call_s",
        "same call, warm": "warm_call_s",
        "allocate 16 MiB, fresh": "fresh_alloc_s",
        "allocate 16 MiB, cached": "cached_alloc_s",
        "launch (one number)": "launch_s",
        "enqueue": "enqueue_s",
        "synchronise": "synchronize_s",
        "compute 512×512 product": "compute_s",
    }
    rows = [("overhead", *(one.device for one in result.overheads), "")]
    for label, key in names.items():
        values = [getattr(one, key) for one in result.overheads]
        if any(value is not None for value in values):
            rows.append((label, *("–" if value is None else units.seconds(value) for value in values), ""))
    for label, key in (("copy in, GB/s", "copy_in_gbytes_per_s"), ("copy out, GB/s", "copy_out_gbytes_per_s")):
        values = [getattr(one, key) for one in result.overheads]
        if any(value is not None for value in values):
            rows.append((label, *(_number(value) for value in values), ""))
    return output.aligned(rows)


def findings(result: BenchResult) -> Iterator[str]:
    """What the numbers say, in words."""
    rows = [row for row in result.results if row.suite == "matmul"]
    if rows:
        largest = max(row.size for row in rows)
        at_largest = [row for row in rows if row.size == largest]
        yield from _precision_words(at_largest)
        yield from _thread_words(at_largest)
    if {row.device for row in result.results} == {"cpu"}:
        yield "crossover   no crossover: only the CPU was measured"
    for one in result.crossover:
        yield f"crossover   {one.operation} {one.dtype}, {one.data}: {one.words}"


def _precision_words(rows: list[BenchRow]) -> Iterator[str]:
    most = max(row.threads for row in rows)
    for device in dict.fromkeys(row.device for row in rows):
        by_dtype = {row.dtype: row for row in rows if row.device == device and row.threads == most}
        plain = by_dtype.pop("fp32", None)
        if plain and by_dtype:
            ratios = (
                f"{dtype} {_ratio(plain.median_s / row.median_s)} (error {row.error:.0e})".replace("e-0", "e-")
                for dtype, row in by_dtype.items()
            )
            yield f"precision   {_name(plain)} on {device}, compared with fp32: {', '.join(ratios)}"
        if plain and device != "cpu":
            yield f"agreement   {_name(plain)} on {device} differs from the CPU by {plain.error:.0e}".replace(
                "e-0", "e-"
            )


def _thread_words(rows: list[BenchRow]) -> Iterator[str]:
    on_cpu = {row.threads: row for row in rows if row.device == "cpu" and row.dtype == rows[0].dtype}
    fewest = on_cpu[min(on_cpu)] if len(on_cpu) > 1 else None
    if fewest:
        others = {count: row for count, row in sorted(on_cpu.items()) if row is not fewest}
        ratios = (f"{count} {_ratio(fewest.median_s / row.median_s)}" for count, row in others.items())
        noun = "thread" if fewest.threads == 1 else "threads"
        yield f"threads     {_name(fewest)}, compared with {fewest.threads} {noun}: {', '.join(ratios)}"


def _name(row: BenchRow) -> str:
    return f"{row.operation} {size_name(row.size)}"


def _ratio(value: float) -> str:
    return f"{value:.2g} ×"


def markdown(result: BenchResult) -> Iterator[str]:
    yield f"**{result.machine.title}**"
    yield ""
    yield f"| suite | {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * (len(COLUMNS) + 1)}"
    for row in result.results:
        yield f"| {row.suite} | {' | '.join(cells(row))} |"
    yield ""
    verdict = verdict_of(result)
    for line in (*findings(result), *result.skipped, *result.warnings, *([verdict.words] if verdict else [])):
        yield f"- {' '.join(line.split())}"


CSV_COLUMNS = (
    *("suite", "operation", "device", "dtype", "size", "threads", "first_s", "median_s", "iqr_s", "min_s"),
    *("gflops", "gbytes_per_s", "roof_share", "bound", "error", "peak_bytes"),
)


def write_csv(result: BenchResult) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in result.results:
        writer.writerow(["" if (value := getattr(row, column)) is None else value for column in CSV_COLUMNS])


def show_comparison(now: BenchResult, before: BenchResult) -> None:
    console = output.prose()
    for difference in now.machine.differences(before.machine):
        console.print(
            output.plain(f"warning: compared with a different machine or version: {difference}", style="yellow")
        )
    changes = compare(now, before)
    if not changes:
        console.print("the two results have no measurements in common")
        return
    header = ("compared", "size", "device", "dtype", "threads", "before", "now", "now / before")
    rows = [
        (
            change.row.operation,
            size_name(change.row.size),
            change.row.device,
            change.row.dtype,
            str(change.row.threads),
            units.seconds(change.before_s),
            units.seconds(change.row.median_s),
            f"{change.ratio:.2f}{'' if change.is_certain else ' (within the spread)'}",
        )
        for change in changes
    ]
    console.print(output.aligned([header, *rows]), soft_wrap=True)
