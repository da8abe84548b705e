"""`clipctl bench`: operations of several sizes on several devices, taking turns, and what limits each of them."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from clipctl.bench import operations
from clipctl.bench.countdown import Countdown, Tell
from clipctl.bench.crossover import find_crossovers
from clipctl.bench.operations import OPERATIONS, Operation
from clipctl.bench.overhead import measure_overhead
from clipctl.bench.results import SUITES, BenchResult, BenchRow, Overhead, Peak
from clipctl.bench.steps import CALIBRATION, ROUNDS, Group, measure_probes
from clipctl.config.sections import PRECISIONS
from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware import devices
from clipctl.hardware.devices import DTYPES, Device
from clipctl.hardware.memory import keep_freed_memory
from clipctl.hardware.profile import Machine, Rates, now_s, update_profile
from clipctl.hardware.sensors import BUSY_CORES, OtherLoad
from clipctl.hardware.timing import MAX_SAMPLES, Stopwatch, Timing, time_in_turns
from clipctl.training.trial import probe_rates

DEFAULT_SIZES = (100_000, 1_000_000, 10_000_000)
CASE_LIMIT_S = 0.4  # for one operation of one size under one setting
ROUND_S = CASE_LIMIT_S / (1 + MAX_SAMPLES)  # of that, in one of its turns
VISIT_S = 1.0  # of a group of training steps, in one of its turns, about
CALL_LIMIT_S = 0.5  # a call that would take longer is left out
PILOT_SIZE = 256 * 256
TELLING_S = 0.005
PEAK_SIDES = (512, 1024, 2048)
BANDWIDTH_ELEMENTS = 32 * 2**20  # 128 MiB each: beyond any cache
CACHE_GB = 0.1  # what moves more than this does not do so from a cache
WRONG_ERROR = 1e-3  # in fp32 two devices differ by less
LAUNCH_BOUND = 3.0  # launch-bound: faster than this many times an operation on one number

_Way = tuple[str, Device, str, int]  # an operation's name, where it runs, in which precision, with how many threads


@dataclass(frozen=True)
class BenchRequest:
    sizes: tuple[int, ...] = DEFAULT_SIZES
    suites: tuple[str, ...] = SUITES
    devices: tuple[str, ...] | None = None  # None: all
    dtypes: tuple[str, ...] = PRECISIONS
    threads: tuple[int, ...] | None = None  # None: one, and one for each core
    groups: tuple[Group, ...] = CALIBRATION  # of training steps
    step_dtypes: tuple[str, ...] = PRECISIONS


def bench(request: BenchRequest, tell: Tell = lambda line: None) -> BenchResult:
    """Measure all that was asked for, and keep what forecasts need."""
    started = time.perf_counter()
    places = [devices.open_device(label) for label in request.devices or devices.labels()]
    if len({place.label for place in places}) < len(places):
        raise ConfigError("a device is named twice")
    _check_room(request, places)
    return _Bench(request, places, tell, started).run()


def _check_room(request: BenchRequest, places: Sequence[Device]) -> None:
    """Refuse before anything is allocated."""
    suites = set(request.suites) - {"step"}
    need = operations.need_bytes(max(request.sizes)) if suites else 0
    for place in places:
        if need > place.memory_bytes:
            raise DeviceError(
                f"--sizes {max(request.sizes):.3g} needs about {need / 2**30:.1f} GiB and {place.label} has "
                f"{place.memory_bytes / 2**30:.1f} GiB free",
                f"up to {place.memory_bytes // (need // max(request.sizes)):.2g} fits",
            )


@dataclass(frozen=True)
class _Case:
    """One operation of one size, run in one way."""

    operation: Operation
    size: int
    place: Device
    dtype: str
    threads: int

    @property
    def name(self) -> str:
        threads = "" if self.place.is_accelerator else f" ×{self.threads}"
        return f"{self.operation.name} {self.size:,} on {self.place.label} {self.dtype}{threads}"

    @property
    def is_reference(self) -> bool:
        """What the other results are compared with."""
        return self.dtype == "fp32" and not self.place.is_accelerator


class _Operands:
    """An operation and its operands, which are moved between samples: where in memory they lie makes a sum or a GELU
    up to half slower, steadily in one process and not in the next."""

    def __init__(self, run: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> None:
        self._run, self._operands = run, operands

    def __call__(self) -> Tensor:
        return self._run(*self._operands)

    def move(self) -> None:
        self._operands = tuple(operand.clone() for operand in self._operands)


class _Bench:
    def __init__(self, request: BenchRequest, places: list[Device], tell: Tell, started: float) -> None:
        self.request, self.places, self.tell, self.started = request, places, tell, started
        self.countdown = Countdown(tell)
        self.cores = Machine.here().cores
        self.threads = request.threads or tuple(dict.fromkeys((self.cores, 1)))
        self.most = max(self.threads)
        self.prices: dict[_Way, float | str] = {}
        self.skipped: list[str] = []
        self.peaks: list[Peak] = []
        self.overheads: list[Overhead] = []

    def run(self) -> BenchResult:
        load = OtherLoad()
        micro = [operation for operation in OPERATIONS if operation.suite in self.request.suites]
        rows: list[BenchRow] = []
        if "step" in self.request.suites:
            self.countdown.expect(len(self.request.groups) * len(self.places) * ROUNDS, VISIT_S)
        if micro:
            self.tell("measuring overheads and peaks")
            self._price(micro)
            self.overheads = [measure_overhead(place) for place in self.places]
            self.peaks = [peak for place in self.places for peak in self._peaks(place)]
            self._price(micro)
            rows = self._rows(micro)
            # Attention may compute in another precision than it is given, so only products say what one reaches.
            self.peaks = raise_peaks(self.peaks, [row for row in rows if row.suite != "attention"])
            rows = place_under_roof(rows, raise_peaks(self.peaks, rows), self.overheads)
        torch.set_num_threads(self.cores)
        if "step" in self.request.suites:
            self.peaks = self.peaks or [peak for place in self.places for peak in self._quick_peaks(place)]
            labels = [place.label for place in self.places]
            probes = measure_probes(
                self.request.groups,
                self.request.step_dtypes,
                labels,
                self.most,
                self.peaks,
                lambda words: self.countdown.tick(VISIT_S),
            )
            rows += probes.rows
            self.skipped += probes.skipped
        result = BenchResult(
            machine=Machine.here(),
            results=rows,
            peaks=self.peaks,
            overheads=self.overheads,
            crossover=find_crossovers([row for row in rows if row.suite != "step"]),
            skipped=self.skipped,
            warnings=list(self._warnings(rows, load.cores())),
            seconds=round(time.perf_counter() - self.started, 2),
            saved_s=now_s(),
        )
        self._keep(result)
        return result

    def _warnings(self, rows: list[BenchRow], other_cores: float) -> Iterator[str]:
        if other_cores > BUSY_CORES:
            yield f"other programs kept {other_cores:.1f} cores busy meanwhile: close them and measure again"
        for row in rows:
            if row.error is not None and row.dtype == "fp32" and not row.error <= WRONG_ERROR:
                words = f"{row.operation} of {row.size:,} on {row.device}"
                yield f"{words} differs from the CPU's result by {100 * row.error:.3g}%"
        if noisy := [row for row in rows if row.is_noisy]:
            yield (
                f"{len(noisy)} of {len(rows)} results spread by more than 10%: the machine was not quiet "
                f"(power saving, heat or other programs)"
            )

    def _keep(self, result: BenchResult) -> None:
        rates = [Rates(one.device, one.dtype, one.threads, one.gflops) for one in self.peaks]
        facts = devices.facts()
        update_profile(lambda kept: replace(kept.with_rates(rates).with_devices(facts), benched_s=result.saved_s))

    # --- the roof -------------------------------------------------------------------------------------------------

    def _peaks(self, place: Device) -> Iterator[Peak]:
        """The best product in each precision, the best copy from memory to memory."""
        torch.set_num_threads(self.most)
        gbytes_per_s = _bandwidth(place)
        for dtype in self.request.dtypes:
            best, call_s, flops = 0.0, 0.0, 1.0
            with suppress(RuntimeError, TypeError):  # a precision that the device does not know
                for side in (64, *PEAK_SIDES):
                    if call_s * (2 * side**3 / flops) > CALL_LIMIT_S / 10:
                        break
                    matrix = torch.randn(side, side).to(place.image, DTYPES[dtype])
                    watch = Stopwatch(partial(torch.mm, matrix, matrix), place.synchronize)
                    timing = time_in_turns({"": watch}, limit_s=0.2)[""]
                    call_s, flops = timing.median_s, 2.0 * side**3
                    best = max(best, flops / call_s / 1e9)
            if best:
                yield Peak(place.label, dtype, self.most, best, gbytes_per_s)

    def _quick_peaks(self, place: Device) -> Iterator[Peak]:
        """Enough to know which precisions are worth a step."""
        for dtype in dict.fromkeys(("fp32", *self.request.dtypes)):
            yield Peak(place.label, dtype, self.most, probe_rates(place, dtype, self.most).gflops)

    # --- operations -----------------------------------------------------------------------------------------------

    def _rows(self, chosen: Sequence[Operation]) -> list[BenchRow]:
        """All of them in turn if their operands fit in memory together, else one after the other."""
        keep_freed_memory()  # as training does
        cases = [case for operation in chosen for case in self._cases(operation)]
        together = sum(operations.need_bytes(size) for _, size in dict.fromkeys((c.operation, c.size) for c in cases))
        free = min(place.memory_bytes for place in self.places)
        by_size: dict[tuple[str, int], list[_Case]] = {}
        for case in cases:
            by_size.setdefault((case.operation.name, case.size), []).append(case)
        groups = [cases] if together < free / 4 else list(by_size.values())
        timings = sum(1 + case.place.is_accelerator for case in cases) * (1 + MAX_SAMPLES)
        self.countdown.expect(timings, ROUND_S)
        rows = [row for group in groups for row in self._measure(group)]
        self.countdown.expect(self.countdown.done - timings, ROUND_S)  # slow ones sat out some rounds
        return sorted(rows, key=lambda row: ([one.name for one in chosen].index(row.operation), row.size))

    def _variants(self) -> list[tuple[Device, str, int]]:
        """Every precision at the most threads; other numbers of threads in the first precision, on the CPU."""
        first = self.request.dtypes[0]
        found = [(place, dtype, self.most) for place in self.places for dtype in self.request.dtypes]
        on_cpu = [place for place in self.places if not place.is_accelerator]
        return found + [(place, first, count) for place in on_cpu for count in self.threads if count != self.most]

    def _price(self, chosen: Sequence[Operation]) -> None:
        """Note what a unit of work of each operation costs in each way, or why it cannot be run.

        Called again, it gives a second chance to what would be left out: now and then a system keeps two threads on one
        core for a second, which must not exclude a case.
        """
        largest = max(self.request.sizes)
        for operation, (place, dtype, threads) in itertools.product(chosen, self._variants()):
            way = (operation.name, place, dtype, threads)
            known = self.prices.get(way, math.inf)
            if isinstance(known, str) or self._is_affordable(known * _amount(operation, largest), threads):
                continue
            torch.set_num_threads(threads)
            try:
                self.prices[way] = min(known, _price_s(operation, largest, place, dtype))
            except (RuntimeError, TypeError) as error:
                self.prices[way] = str(error).strip().splitlines()[0]

    def _is_affordable(self, call_s: float, threads: int) -> bool:
        """Fewer threads may take longer in proportion, so that thread counts are compared at the same sizes."""
        return call_s * threads / self.most <= CALL_LIMIT_S

    def _cases(self, operation: Operation) -> Iterator[_Case]:
        """The cases that are affordable, by their price."""
        for place, dtype, threads in self._variants():
            price = self.prices[operation.name, place, dtype, threads]
            for size in sorted(self.request.sizes):
                case = _Case(operation, size, place, dtype, threads)
                if isinstance(price, str):
                    self.skipped.append(f"{case.name}: {price}")
                    break
                call_s = price * _amount(operation, size)
                if not self._is_affordable(call_s, threads):
                    self.skipped.append(f"{case.name}: a call would take about {call_s:.2g} s")
                    break
                yield case

    def _measure(self, cases: Sequence[_Case]) -> Iterator[BenchRow]:
        works: dict[str, _Operands] = {}
        watches = {}
        operands: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        references: dict[tuple[str, int], Tensor] = {}
        for case in cases:
            key = (case.operation.name, case.size)
            if key not in operands:
                operands[key] = case.operation.operands(case.size)
                references[key] = case.operation.run(*operands[key])
            here = tuple(operand.to(DTYPES[case.dtype]) for operand in operands[key])
            there = tuple(operand.to(case.place.image) for operand in here)
            works[case.name] = _Operands(case.operation.run, there)
            watches[case.name] = Stopwatch(works[case.name], case.place.synchronize)
            if case.place.is_accelerator:
                trip = partial(_round_trip, case.operation, here, case.place)
                watches[f"{case.name}, round trip"] = Stopwatch(trip, case.place.synchronize)
        threads = {f"{case.name}{end}": case.threads for case in cases for end in ("", ", round trip")}

        def prepare(name: str) -> None:
            torch.set_num_threads(threads[name])
            self.countdown.tick(ROUND_S)
            if name in works:
                works[name].move()

        timings = time_in_turns(watches, limit_s=CASE_LIMIT_S, before_round=prepare)
        for case in cases:
            reference = references[case.operation.name, case.size]
            error = None if case.is_reference else _error(works[case.name](), reference)
            yield self._row(case, timings[case.name], timings.get(f"{case.name}, round trip"), error)

    def _row(self, case: _Case, timing: Timing, trip: Timing | None, error: float | None) -> BenchRow:
        seconds = timing.median_s
        moved = case.operation.elements_moved(case.size) * DTYPES[case.dtype].itemsize
        return BenchRow(
            suite=case.operation.suite,
            operation=case.operation.name,
            device=case.place.label,
            dtype=case.dtype,
            size=case.size,
            threads=case.threads,
            first_s=timing.first_s,
            median_s=seconds,
            iqr_s=timing.iqr_s,
            min_s=timing.min_s,
            samples_s=list(timing.samples_s),
            gflops=case.operation.flops(case.size) / seconds / 1e9 or None,
            gbytes_per_s=moved / seconds / 1e9,
            round_trip=list(trip.samples_s) if trip else None,
            error=error,
        )


def place_under_roof(rows: Sequence[BenchRow], peaks: Sequence[Peak], overheads: Sequence[Overhead]) -> list[BenchRow]:
    """Each row's share of the roof that the peaks measured here draw over it, and which roof that is."""
    launches = {one.device: one.launch_s for one in overheads}
    roofs = {(peak.device, peak.dtype, peak.threads): peak for peak in peaks}
    placed = []
    for row in rows:
        share, bound = None, None
        if peak := roofs.get((row.device, row.dtype, row.threads)):
            share, bound = _roof(row, peak, launches.get(row.device, 0.0))
        placed.append(replace(row, roof_share=share, bound=bound))
    return placed


def _roof(row: BenchRow, peak: Peak, launch_s: float) -> tuple[float | None, str]:
    if row.median_s < LAUNCH_BOUND * launch_s:
        return None, "launch"
    of_compute = (row.gflops or 0.0) / peak.gflops
    of_memory = (row.gbytes_per_s or 0.0) / peak.gbytes_per_s if peak.gbytes_per_s else 0.0
    if row.gflops and of_compute >= of_memory:
        return of_compute, "compute"
    # Faster than memory allows: the data did not come from there.
    return (of_memory, "memory") if of_memory <= 1.1 else (None, "cache")


def raise_peaks(peaks: Sequence[Peak], rows: Sequence[BenchRow]) -> list[Peak]:
    """A roof is the best rate seen anywhere; for memory, anywhere that no cache can have helped."""
    raised = []
    for peak in peaks:
        mine = [row for row in rows if (row.device, row.threads) == (peak.device, peak.threads)]
        gflops = [row.gflops for row in mine if row.dtype == peak.dtype and row.gflops]
        gbytes = [row.gbytes_per_s for row in mine if row.gbytes_per_s and row.gbytes_per_s * row.median_s > CACHE_GB]
        best = max([peak.gflops, *gflops]), max([peak.gbytes_per_s or 0.0, *gbytes])
        raised.append(replace(peak, gflops=best[0], gbytes_per_s=best[1]))
    return raised


def _bandwidth(place: Device) -> float:
    """The bandwidth of a sum of arrays too large for any cache."""
    one, two, total = (torch.ones(BANDWIDTH_ELEMENTS, device=place.image) for _ in range(3))
    watch = Stopwatch(partial(torch.add, one, two, out=total), place.synchronize)
    seconds = time_in_turns({"": watch}, limit_s=0.5)[""].min_s
    return 3 * 4 * BANDWIDTH_ELEMENTS / seconds / 1e9


def _price_s(operation: Operation, most: int, place: Device, dtype: str) -> float:
    """Seconds of a unit of work, from calls that grow until one takes long enough to tell, or as large as the
    largest."""
    pilot = min(PILOT_SIZE, most)
    while True:
        there = tuple(operand.to(place.image, DTYPES[dtype]) for operand in operation.operands(pilot))
        watch = Stopwatch(partial(operation.run, *there), place.synchronize)
        seconds = watch.sample()
        seconds = min(seconds, *(watch.sample() for _ in range(1 if seconds > 10 * TELLING_S else 6)))
        if pilot == most or seconds > TELLING_S:
            return seconds / _amount(operation, pilot)
        pilot = min(8 * pilot, most)


def _amount(operation: Operation, size: int) -> float:
    return operation.flops(size) + operation.elements_moved(size)


def _round_trip(operation: Operation, operands: tuple[Tensor, ...], place: Device) -> Tensor:
    return operation.run(*(operand.to(place.image) for operand in operands)).cpu()


def _error(result: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    difference = (result.cpu().float() - reference).abs().max()
    return float(difference / reference.abs().max())
