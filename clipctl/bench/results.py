"""The results of a benchmark, and how they are saved and compared. No torch."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from clipctl import files
from clipctl.errors import DataError
from clipctl.hardware.profile import Machine

SCHEMA = "clipctl.bench/1"
LIMIT_BYTES = 50_000_000
NOISY_SPREAD = 0.10
SUITES = ("elementwise", "matmul", "attention", "step")


@dataclass(frozen=True)
class BenchRow:
    """One operation at one size in one setting."""

    suite: str  # elementwise, matmul, attention, step
    operation: str
    device: str
    dtype: str
    size: int  # float32 elements; for a step, pairs
    threads: int
    first_s: float
    median_s: float
    iqr_s: float
    min_s: float
    samples_s: list[float]
    gflops: float | None = None
    gbytes_per_s: float | None = None
    roof_share: float | None = None  # of what the measured peaks allow (roofline)
    bound: str | None = None  # compute, memory, cache or launch: what limits it
    round_trip: list[float] | None = None  # samples with the data copied in and the result copied out
    error: float | None = (
        None  # largest difference from the CPU's fp32 result (None there), relative to its largest value
    )
    peak_bytes: int | None = None  # of a step
    workload: dict[str, Any] | None = None  # of a step

    @property
    def setting(self) -> str:
        """cpu fp32 ×2, mps fp16."""
        return f"{self.device} {self.dtype}" + (f" ×{self.threads}" if self.device == "cpu" else "")

    @property
    def is_noisy(self) -> bool:
        return len(self.samples_s) > 1 and self.iqr_s > NOISY_SPREAD * self.median_s


@dataclass(frozen=True)
class Overhead:
    """A device's overhead besides computing, each part measured separately. None: does not apply."""

    device: str
    init_s: float | None  # until the first tensor exists, in a new process
    first_call_s: float  # of an operation never run before
    warm_call_s: float  # the same operation later
    fresh_alloc_s: float  # 16 MiB from the system
    cached_alloc_s: float  # 16 MiB that were just freed
    launch_s: float  # one operation on one number
    enqueue_s: float | None  # until the call returns
    synchronize_s: float | None  # with nothing to wait for
    copy_in_gbytes_per_s: float | None
    copy_out_gbytes_per_s: float | None
    compute_s: float  # of a 512 × 512 product


@dataclass(frozen=True)
class Peak:
    """The best rates measured here: the roof of the roofline model."""

    device: str
    dtype: str
    threads: int
    gflops: float
    gbytes_per_s: float | None = None


@dataclass(frozen=True)
class Crossover:
    """The size above which a device beats the CPU; `size` is None if that is nowhere or everywhere in range."""

    operation: str
    dtype: str
    device: str
    data: str  # resident, round trip
    size: float | None
    low: float | None  # bootstrap interval
    high: float | None
    words: str


@dataclass(frozen=True)
class BenchResult:
    machine: Machine
    results: list[BenchRow]
    peaks: list[Peak] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    crossover: list[Crossover] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    saved_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def parse(cls, document: Any) -> "BenchResult":
        """Parse what `to_dict` wrote. Raises ValueError for anything else."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not a document of schema {SCHEMA}")
        parts: dict[str, type] = {"results": BenchRow, "peaks": Peak, "overheads": Overhead, "crossover": Crossover}
        try:
            values: dict[str, Any] = {name: [kind(**one) for one in document[name]] for name, kind in parts.items()}
            plain = {item.name: document[item.name] for item in fields(cls) if item.name not in (*parts, "machine")}
            for row in values["results"]:
                if not row.samples_s or not row.median_s > 0:
                    raise ValueError("a row without samples")
            return cls(machine=Machine.parse(document["machine"]), **values, **plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"incomplete: {error}") from None


def save_result(result: BenchResult, path: Path) -> None:
    files.write_json(path, result.to_dict())


def load_result(path: Path) -> BenchResult:
    try:
        return BenchResult.parse(files.read_json(path, LIMIT_BYTES))
    except FileNotFoundError:
        raise DataError(f"no such file: {path}", "create one with clipctl bench --save FILE") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a result of clipctl bench: {error}", "create one with clipctl bench --save FILE"
        ) from None


@dataclass(frozen=True)
class Change:
    """The same row in two results."""

    row: BenchRow
    before_s: float
    ratio: float  # now / before; below 1 is faster
    is_certain: bool  # the interquartile ranges do not overlap


def compare(now: BenchResult, before: BenchResult) -> list[Change]:
    """Compares the rows that are in both results."""
    earlier = {_key(row): row for row in before.results}
    changes = []
    for row in now.results:
        if old := earlier.get(_key(row)):
            overlap = abs(row.median_s - old.median_s) <= (row.iqr_s + old.iqr_s) / 2
            changes.append(Change(row, old.median_s, row.median_s / old.median_s, not overlap))
    return changes


def _key(row: BenchRow) -> tuple[Any, ...]:
    return row.suite, row.operation, row.device, row.dtype, row.size, row.threads
