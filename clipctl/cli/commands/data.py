"""clipctl data …"""

from dataclasses import asdict
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.errors import ConfigError

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
    """Show how the data is read, what it contains and what is wrong with it."""
    from clipctl.cli.views import inspection
    from clipctl.config.layers import resolve
    from clipctl.data.inspection import inspect_data
    from clipctl.data.sheet import source_sheet
    from clipctl.hardware.processes import interrupts_raised

    asked = resolve(layers)
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
    model_images_per_s = model_speed(asked, found.vocabulary)
    if sheet:
        source_sheet(opened.train, sheet)
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
    from clipctl.model.cost import workload_of
    from clipctl.model.forecast import CostModel
    from clipctl.model.workload import ASSUMED_TEXT_TOKENS, Setting

    text = replace(config.model.text, vocab_size=config.model.text.vocab_size or vocabulary)
    model = replace(config.model, text=text)
    workload = workload_of(replace(config, model=model), min(ASSUMED_TEXT_TOKENS, text.context))
    estimate = CostModel(load_profile()).step_s(Setting("cpu", "fp32", cpu.usable_cores()), workload)
    return config.train.batch_size / estimate.value if estimate else None


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

    if folds == 1:
        raise ConfigError("--folds must be 2 or more: each part is judged by a model trained on the others")
    if sheet:
        check_sheet(sheet)
    if out and not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} to write {out.name} to")
    with output.counting("embedding", "loading the model") as (tell, progress):
        from clipctl.inference.suspects import find_suspects, write_csv
        from clipctl.runs.rundir import runs_root
        from clipctl.runs.store import find_checkpoint

        checkpoint = find_checkpoint(runs_root(runs_dir), run, default="best")
        found = find_suspects(checkpoint, folds, tell, progress)
    if out:
        write_csv(found, out)
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
