"""clipctl data …"""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from clipctl.cli import options, output
from clipctl.errors import ExitCode

if TYPE_CHECKING:
    from clipctl.config.layers import Layer
    from clipctl.config.sections import TrainConfig


@options.takes(*options.DATA_FLAGS, options.PRESET_FLAG)
def inspect(
    layers: "list[Layer]",
    data: options.DataToInspect,
    deep: options.DeepLook = False,
    sheet: options.Sheet = None,
    json: options.Json = False,
) -> None:
    """Show how the data is read, what it contains, and whether it is ready to train on (exit code 3 if not)."""
    from clipctl.cli.views import inspection
    from clipctl.config.layers import resolve
    from clipctl.data.inspection import inspect_data
    from clipctl.data.sheet import check_sheet, source_sheet
    from clipctl.hardware.processes import interrupts_raised

    asked = resolve(layers)
    if sheet:
        check_sheet(sheet)
    with output.counting("decoding", "looking at the data") as (tell, progress), interrupts_raised():
        opened, found = inspect_data(
            asked.data,
            size_px=asked.model.image.size_px,
            context=asked.model.text.context,
            batch_size=asked.train.batch_size,
            deep=deep,
            progress=progress,
            tell=tell,
        )
    # Which model a recipe chooses is not known before it is planned.
    has_model = any("preset" in layer.values for layer in layers) or asked.recipe == "plain"
    model_images_per_s = model_speed(asked, found.vocabulary) if has_model else None
    if sheet:
        source_sheet(opened.train, sheet)
        output.prose().print(f"wrote {sheet}", markup=False)
    if json:
        output.print_json("data-inspect", {**found.to_dict(), "model_images_per_s": model_images_per_s})
    else:
        output.data().print(inspection.view(found, asked.preset, model_images_per_s))
        output.data().print(inspection.verdict(found, train_command(layers)), soft_wrap=True)
    if not found.ready:
        raise typer.Exit(ExitCode.CHECK)


def train_command(layers: "list[Layer]") -> str:
    """`clipctl train` with the data and settings given here."""
    data, settings = list[str](), list[str]()
    for layer in layers:
        if layer.origin == "DATA":
            data += layer.values["data.source"]
        elif layer.origin == "--set":
            settings += [word for key, value in layer.values.items() for word in ("--set", f"{key}={value}")]
        elif layer.origin.startswith("--"):
            settings += [layer.origin, *layer.values.values()]
        else:
            settings += ["--config", layer.origin]
    return shlex.join(["clipctl", "train", *data, *settings])


def model_speed(config: "TrainConfig", vocabulary: int) -> float | None:
    """Pictures per second that the model can train on, on the CPU, from this machine's measurements."""
    from dataclasses import replace

    from clipctl.hardware import cpu
    from clipctl.hardware.profile import load_profile
    from clipctl.model.cost import workload_of
    from clipctl.model.forecast import CostModel
    from clipctl.model.workload import ASSUMED_TEXT_TOKENS, Setting

    text = replace(config.model.text, vocab_size=config.model.text.vocab_size or vocabulary)
    model = replace(config.model, text=text)
    workload = workload_of(replace(config, model=model), min(ASSUMED_TEXT_TOKENS, text.context))
    estimate = CostModel(load_profile()).step_s(Setting("cpu", "fp32", cpu.usable_cores()), workload)
    return config.train.batch_size / estimate.value if estimate else None


def template(
    directory: options.PictureFolder, from_names: options.FromNames = False, json: options.Json = False
) -> None:
    """Write a table of captions to fill in, one row per picture: clipctl data template DIR > captions.csv"""
    import sys

    from clipctl.data.template import HEADER, template_of, write_template

    made = template_of(directory, from_names=from_names)
    if json:
        rows = [dict(zip(HEADER, row, strict=True)) for row in made.rows]
        output.print_json("data-template", {"rows": rows, "odd_names": made.odd_names})
    else:
        write_template(made, sys.stdout)
    empty = sum(not caption for _, caption in made.rows)
    words = (
        f"{len(made.rows):,} pictures, {empty:,} without a caption: fill in the column caption, or training skips them"
    )
    output.prose().print(words, markup=False)
    if made.odd_names:
        words = f"{made.odd_names:,} picture{'s' * (made.odd_names > 1)} left out: control characters in the name"
        output.prose().print(words, markup=False)


def suspects(
    run: options.Model,
    folds: options.Folds = 0,
    top: options.TopPairs = 20,
    out: options.SuspectsOut = None,
    sheet: options.Sheet = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Find captions that do not fit their picture, and pictures on both sides of the split."""
    from clipctl.cli.views import suspects as view
    from clipctl.data.sheet import check_sheet

    if sheet:
        check_sheet(sheet)
    with output.stops_said(), output.counting("embedding", "loading the model") as (tell, progress):
        from clipctl.inference.suspects import suspects

        found = suspects(run, folds=folds, csv=out, runs_dir=runs_dir, tell=tell, progress=progress)
    if out:
        output.prose().print(f"wrote {out}", markup=False)
    if sheet:
        view.write_sheet_of(found.suspects[:top], found.places, sheet)
        output.prose().print(f"wrote {sheet}", markup=False)
    if json:
        facts = {"folds": found.folds, "pairs": len(found.suspects)}
        suspected = [asdict(one) for one in found.suspects[:top]]
        duplicates = [asdict(one) for one in found.duplicates]
        output.print_json("data-suspects", {**facts, "suspects": suspected, "duplicates": duplicates})
    else:
        output.show_parts(view.parts(found, top))
