"""clipctl eval"""

from typing import TYPE_CHECKING, Any

from clipctl.cli import options, output, torchrun
from clipctl.cli.commands.embed import show_reasons
from clipctl.config.layers import resolve
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from clipctl.config.layers import Layer
    from clipctl.config.sections import DataConfig
    from clipctl.data.source import Source
    from clipctl.inference.embedder import Embedder
    from clipctl.inference.evaluation import EmbeddedData, ZeroShot
    from clipctl.progress import Tell


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
    if classes:
        parse_labels(classes, None)
    check_templates(template or [])
    world = torchrun.joined(nproc)
    helps = world is not None and not world.is_first
    with (
        torchrun.following() if helps else torchrun.leading(world),
        output.counting("embedding", "loading the model", silent=helps) as (tell, progress),
    ):
        from clipctl.inference import evaluation
        from clipctl.inference.embedder import load
        from clipctl.training.distributed import prepared

        def make() -> "tuple[list[Embedder], DataConfig, Source, Source | None]":
            place = world.place_on(device) if world else device
            embedders = [load(name, runs_dir=runs_dir, device=place) for name in (model, *(against or ()))]
            if not data and not embedders[0].identity.is_of_run:
                raise ConfigError(f"{model} has no held-out pictures of its own", "name data: clipctl eval MODEL DATA")
            config = asked if data else embedders[0].config.data
            return embedders, config, *opened(config, is_own=not data, of=embedders[0].config.data, tell=tell)

        embedders, config, source, trained_on = prepared(world, make)
        if world is not None:
            evaluation.check_same(world, embedders, source)
        found, embedded = [], None
        for embedder in embedders:
            tell(f"embedding with {embedder.identity.name}")
            embedded = evaluation.embed_data(embedder, source, progress, world)
            if helps:
                continue
            naming = named(embedder, embedded, source, config, classes, template)
            found.append(evaluation.scores_of(embedder, embedded, naming))
        if helps:
            return
        assert embedded is not None
        tell("comparing with pixels")
        baseline = evaluation.baseline(embedded, trained_on)
    differences = [evaluation.difference(found[0], other) for other in found[1:]]
    facts = {
        "data": source.name,
        "pictures": embedded.pictures,
        "captions": len(embedded.captions),
        "chance": evaluation.chance_recalls(embedded),
        "baseline_r1": baseline,
    }
    bad = [{"path": source.label(one.picture), "reason": one.reason} for one in embedded.bad]
    if json:
        first, *others = (one.to_dict() for one in found)
        compared = [
            {**other, "difference": {**gap._asdict(), "more_than_chance": gap.is_more_than_chance}}
            for other, gap in zip(others, differences, strict=True)
        ]
        output.print_json("eval", {**facts, **first, "against": compared, "bad": bad})
    else:
        show_reasons({one["path"]: one["reason"] for one in bad})
        output.show_parts(views.parts(facts, found, differences))


def opened(config: "DataConfig", *, is_own: bool, of: "DataConfig", tell: "Tell") -> "tuple[Source, Source | None]":
    """The data to evaluate on, and the model's training pictures, if they still exist."""
    from clipctl.data.catalog import open_held_out, read_data
    from clipctl.errors import DataError

    try:
        own = read_data(of, tell)
    except (DataError, OSError):
        if is_own:
            raise
        return open_held_out(config, tell), None
    return (own.val if is_own else open_held_out(config, tell)), own.train


def named(
    embedder: "Embedder",
    data: "EmbeddedData",
    source: "Source",
    config: "DataConfig",
    classes: str | None,
    templates: list[str] | None,
) -> "ZeroShot | None":
    """Zero-shot scores, for class folders or if classes were given."""
    from clipctl.data.catalog import class_names
    from clipctl.inference.evaluation import zero_shot
    from clipctl.inference.labels import parse_labels

    folders = class_names(source, config.template)
    if classes is None and folders is None:
        if templates:
            raise ConfigError("--template needs class folders or --classes")
        return None
    bad = {one.picture for one in data.bad}
    truths: list[Any] = data.captions[: data.pictures]
    if folders is not None:
        truths = [label for number, label in enumerate(folders) if number not in bad]
    labels = parse_labels(classes, None) if classes else sorted(set(truths))
    lower = {label.lower(): label for label in labels}
    truths = [lower.get(label.lower()) for label in truths]
    usual = [config.template] if folders is not None else ["{}"]
    return zero_shot(embedder, data, truths, labels, templates or usual)
