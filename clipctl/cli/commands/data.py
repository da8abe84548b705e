"""clipctl data …"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clipctl.cli import options, output

if TYPE_CHECKING:
    from clipctl.config.layers import Layer
    from clipctl.config.sections import TrainConfig
    from clipctl.progress import Count, Tell


@options.takes(*options.DATA_FLAGS, options.PRESET_FLAG)
def inspect(
    layers: "list[Layer]",
    data: options.DataToInspect,
    deep: options.DeepLook = False,
    sheet: options.Sheet = None,
    json: options.Json = False,
) -> None:
    """Show how the data is read, what it contains and what is wrong with it."""
    from clipctl.cli.views import inspection
    from clipctl.config.layers import resolve
    from clipctl.data.inspection import inspect_data
    from clipctl.data.sheet import write_sheet
    from clipctl.hardware.processes import interrupts_raised

    asked = resolve(layers)
    with watching() as (tell, progress), interrupts_raised():
        opened, found = inspect_data(
            asked.data,
            size_px=asked.model.image.size_px,
            context=asked.model.text.context,
            batch_size=asked.train.batch_size,
            deep=deep,
            progress=progress,
            tell=tell,
        )
    model_images_per_s = model_speed(asked, found.vocabulary)
    if sheet:
        write_sheet(opened.train, sheet)
        output.prose().print(f"wrote {sheet}", markup=False)
    if json:
        output.print_json("data-inspect", {**found.to_dict(), "model_images_per_s": model_images_per_s})
    else:
        output.data().print(inspection.view(found, asked.preset, model_images_per_s))


def model_speed(config: "TrainConfig", vocabulary: int) -> float | None:
    """Pictures a second that the model could train on, on the CPU, by what was measured on this machine."""
    from dataclasses import replace

    from clipctl.hardware import cpu
    from clipctl.hardware.profile import load_profile
    from clipctl.model.forecast import CostModel
    from clipctl.model.workload import ASSUMED_TEXT_TOKENS, Setting, Workload

    text = replace(config.model.text, vocab_size=config.model.text.vocab_size or vocabulary)
    model = replace(config.model, text=text)
    workload = Workload.of(replace(config, model=model), min(ASSUMED_TEXT_TOKENS, text.context))
    estimate = CostModel(load_profile()).step_s(Setting("cpu", "fp32", cpu.usable_cores()), workload)
    return config.train.batch_size / estimate.value if estimate else None


@contextmanager
def watching() -> "Iterator[tuple[Tell, Count]]":
    """What takes long and how far it is: a bar in a terminal, a line now and then elsewhere."""
    console = output.prose()
    if not console.is_terminal:
        with output.saying("") as tell:
            yield tell, lambda done, total: tell(f"decoded {done:,} of {total:,} pictures")
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking at the data", total=None)
        yield (
            lambda words: bar.update(task, description=escape(words)),
            lambda done, total: bar.update(task, description="decoding", completed=done, total=total),
        )
