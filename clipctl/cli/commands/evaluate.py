"""clipctl eval"""

from typing import TYPE_CHECKING

from clipctl.cli import options, output, torchrun
from clipctl.cli.commands.embed import show_reasons
from clipctl.config.layers import resolve

if TYPE_CHECKING:
    from clipctl.config.layers import Layer


@options.takes(*options.READING_FLAGS)
def evaluate(
    layers: "list[Layer]",
    model: options.Model,
    data: options.DataToJudgeBy = None,
    against: options.Against = None,
    classes: options.Classes = None,
    template: options.Templates = None,
    device: options.DeviceOf = "cpu",
    nproc: options.Helpers = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Evaluate a model on data, by default on the held-out pictures of its run."""
    from clipctl.cli.views import evaluation as views
    from clipctl.inference.labels import check_templates, parse_labels

    asked = resolve(layers).data
    labels = parse_labels(classes, None) if classes else None
    check_templates(template or [])
    world = torchrun.joined(nproc)
    helps = world is not None and not world.is_first
    with (
        torchrun.following() if helps else torchrun.leading(world),
        output.counting("embedding", "loading the model", silent=helps) as (tell, progress),
    ):
        from clipctl.inference.comparison import Task, compare, prepare
        from clipctl.inference.embedder import load
        from clipctl.inference.evaluation import check_same
        from clipctl.training.distributed import prepared

        def make() -> Task:
            place = world.place_on(device) if world else device
            embedders = [load(name, runs_dir=runs_dir, device=place) for name in (model, *(against or ()))]
            return prepare(embedders, asked if data else None, labels, template or (), tell)

        task = prepared(world, make)
        if world is not None:
            check_same(world, task.embedders, task.source)
        found = compare(task, tell, progress, world)
    if found is None:
        return
    if json:
        output.print_json("eval", found.to_dict())
    else:
        show_reasons({one["path"]: one["reason"] for one in found.bad})
        output.show_parts(views.parts(found))
