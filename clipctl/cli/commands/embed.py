"""clipctl embed"""

import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clipctl import files
from clipctl.cli import options, output, torchrun
from clipctl.cli.views import units
from clipctl.config.layers import resolve
from clipctl.errors import ConfigError, ExitCode, Stopped, Terminated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clipctl.config.layers import Layer
    from clipctl.data.formats.rows import Hints
    from clipctl.inference.embedder import Embedder
    from clipctl.inference.gallery import BadFile, Gallery
    from clipctl.progress import Tell
    from clipctl.training.distributed import World

LISTED_BAD = 10


@options.takes(*options.READING_FLAGS)
def embed(
    layers: "list[Layer]",
    model: options.Model,
    data: options.Places,
    out: options.IndexOut,
    dtype: options.Dtype = "float16",
    device: options.DeviceOf = "cpu",
    nproc: options.Helpers = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Embed pictures into a searchable index; run it again to embed only new or changed pictures."""
    if dtype not in ("float16", "float32"):
        raise ConfigError(f"--dtype must be float16 or float32, got {dtype!r}")
    asked = resolve(layers).data
    world = torchrun.joined(nproc)
    if world is not None and not world.is_first:
        from clipctl.data.catalog import hints_of
        from clipctl.inference.refresh import help_refresh

        with torchrun.following():
            help_refresh(world, *opened(model, data, hints_of(asked), device, runs_dir, lambda words: None, world))
        return
    counting = output.counting("embedding", "looking for pictures")
    with output.stops_said(), torchrun.leading(world), counting as (tell, progress):
        from clipctl.data.catalog import hints_of
        from clipctl.inference.refresh import refresh

        hints = hints_of(asked)
        embedder, gallery = opened(model, data, hints, device, runs_dir, tell, world)
        kind: Any = dtype
        with work_kept():
            done = refresh(out, embedder, gallery, data, kind, progress, world=world, hints=hints)
    size_bytes = files.size_on_disk(out)
    if json:
        facts = {"index": str(out), "model": embedder.identity.name, "dimensions": embedder.dimensions}
        counts = {"pictures": done.pictures, "embedded": done.embedded, "forgotten": done.forgotten}
        output.print_json("embed", {**facts, **counts, "size_bytes": size_bytes, "bad": bad_rows(done.bad)})
        return
    show_bad(done.bad)
    words = f"{done.pictures:,} pictures in {out} ({units.size(size_bytes)}): {done.embedded:,} embedded now"
    words += f", {done.forgotten:,} forgotten" if done.forgotten else ""
    answer = output.data()
    answer.print(output.plain(words), soft_wrap=True)
    answer.print(output.plain(f"\n  clipctl search {shlex.quote(str(out))} 'what to look for'"), soft_wrap=True)


@contextmanager
def work_kept() -> "Iterator[None]":
    """While an index is refreshed, Ctrl-C and SIGTERM stop it without losing what was embedded."""
    from clipctl.hardware.processes import interrupts_raised

    try:
        with interrupts_raised():
            yield
    except KeyboardInterrupt as stop:
        code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
        words = "stopped; the pictures embedded so far are kept"
        raise Stopped(words, "The same command continues from there", code) from None


def opened(
    model: str,
    places: list[str],
    hints: "Hints",
    device: str,
    runs_dir: str | None,
    tell: "Tell",
    world: "World | None",
) -> "tuple[Embedder, Gallery]":
    """The model, and the pictures to embed with it."""
    from clipctl.inference.embedder import load
    from clipctl.inference.gallery import open_gallery
    from clipctl.inference.refresh import check_same
    from clipctl.training.distributed import prepared

    def make() -> "tuple[Embedder, Gallery]":
        gallery = open_gallery(places, tell, hints)
        tell("loading the model")
        return load(model, runs_dir=runs_dir, device=world.place_on(device) if world else device), gallery

    embedder, gallery = prepared(world, make)
    if world is not None:
        check_same(world, gallery)
    return embedder, gallery


def bad_rows(bad: "list[BadFile]") -> list[dict[str, str]]:
    return [{"path": one.picture.path, "reason": one.reason} for one in bad]


def show_bad(bad: "list[BadFile]") -> None:
    show_reasons({one.picture.path: one.reason for one in bad})


def show_reasons(reasons: dict[str, str]) -> None:
    """Pictures that could not be used, and why."""
    from clipctl.data.bad import bad_counts, bad_lines

    if reasons:
        noun = "picture" if len(reasons) == 1 else "pictures"
        words = f"{len(reasons):,} {noun} cannot be used: {bad_counts(reasons.values())}"
        console = output.prose()
        for line in (words, *(f"  {line}" for line in bad_lines(reasons, LISTED_BAD))):
            console.print(output.plain(line, style="yellow"), soft_wrap=True)
