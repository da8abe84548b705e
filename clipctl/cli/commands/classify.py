"""clipctl classify"""

import csv
import sys
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.cli.commands.embed import bad_rows, show_bad
from clipctl.cli.views.paths import shown
from clipctl.config.layers import resolve
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from clipctl.config.layers import Layer
    from clipctl.inference.labels import Named


@options.takes(*options.READING_FLAGS)
def classify(
    layers: "list[Layer]",
    model: options.Model,
    data: options.Places,
    labels: options.Labels = None,
    labels_file: options.LabelsFile = None,
    template: options.Templates = None,
    top: options.TopLabels = 1,
    device: options.DeviceOf = "cpu",
    runs_dir: options.RunsDir = None,
    as_csv: options.Csv = False,
    json: options.Json = False,
) -> None:
    """Classify pictures: which of several labels fits each best."""
    if json and as_csv:
        raise ConfigError("--json and --csv cannot be combined", "leave one of them out")
    asked = resolve(layers).data
    with output.counting("classifying", "looking for pictures") as (tell, progress):
        from clipctl.data.catalog import hints_of
        from clipctl.inference import labels as naming
        from clipctl.inference.embedder import load
        from clipctl.inference.gallery import open_gallery

        names, templates = naming.parse_labels(labels, labels_file), template or [naming.PLACE]
        naming.check_templates(templates)
        gallery = open_gallery(data, tell, hints_of(asked))
        tell("loading the model")
        embedder = load(model, runs_dir=runs_dir, device=device)
        named, bad = naming.classify(embedder, gallery, names, templates, min(top, len(names)), progress)
    show_bad(bad)
    if json:
        rows = [
            {"path": one.path, "labels": [{"label": label, "probability": share} for label, share in one.labels]}
            for one in named
        ]
        output.print_json("classify", {"labels": names, "pictures": rows, "bad": bad_rows(bad)})
    elif as_csv:
        print_csv(named)
    else:
        output.data().print(output.aligned(table(named)), soft_wrap=True)


def table(named: "list[Named]") -> list[tuple[str, ...]]:
    header = ("picture", *("label", "probability") * len(named[0].labels))
    rows = [
        (shown(one.path), *(text for label, share in one.labels for text in (label, f"{share:.0%}"))) for one in named
    ]
    return [header, *rows]


def print_csv(named: "list[Named]") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["path", "rank", "label", "probability"])
    for one in named:
        for rank, (label, share) in enumerate(one.labels, start=1):
            # A name that is not UTF-8 would end the output.
            path = one.path.encode(errors="replace").decode()
            writer.writerow([path, rank, label, f"{share:.6f}"])
