"""clipctl checkpoint import | export: models from elsewhere, and models for elsewhere."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from clipctl.interop.card import Card
    from clipctl.interop.models import Found

FORMATS = ("transformers", "open_clip", "both", "safetensors", "onnx", "coreml")


def import_(
    model: options.Model,
    out: options.ModelOut,
    tokenizer: options.TokenizerFile = None,
    activation: options.Activation = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Turn a model of transformers, open_clip or OpenAI, or from the hub, into one of clipctl's."""
    from clipctl.cli.views.convert import imported_text
    from clipctl.runs.rundir import runs_root

    with output.saying(f"reading {model}") as tell:
        from clipctl.interop.export import export_native
        from clipctl.interop.foreign import Hints
        from clipctl.interop.models import load_any
        from clipctl.model import cost

        found = load_any(runs_root(runs_dir), model, Hints(tokenizer, activation), tell=tell)
        export_native(found.model, out, card_of(found, out))
    shape = found.model.config.model
    facts = {
        "model": model,
        "path": str(out),
        "parameters": cost.parameters(shape),
        "image": shape.image.words,
        "text": f"{shape.text.width}×{shape.text.depth}",
        "activation": shape.activation,
        "revision": found.revision,
    }
    if json:
        output.print_json("checkpoint-import", facts)
    else:
        output.data().print(imported_text(facts), soft_wrap=True)


def export(
    model: options.Model,
    out: options.ModelOut,
    to: options.ExportFormat = "both",
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Write a model for other programs, and prove that they compute the same with it."""
    from clipctl.cli.views.convert import exported_text
    from clipctl.runs.rundir import runs_root

    if to not in FORMATS:
        raise ConfigError(f"--to must be one of {', '.join(FORMATS)}, got {to!r}")
    with output.saying(f"reading {model}") as tell:
        from clipctl.interop import export as exports
        from clipctl.interop.models import load_any
        from clipctl.interop.proof import prove

        exports.check_target(out)
        found = load_any(runs_root(runs_dir), model, tell=tell)
        tell(f"writing {out}")
        proofs = []
        if to in exports.LIBRARIES:
            exports.export_libraries(found.model, out, exports.LIBRARIES[to], card_of(found, out))
            tell("comparing with what reads it")
            proofs = prove(found.model, out, exports.LIBRARIES[to])
        else:
            exports.export_native(found.model, out, card_of(found, out))
    size_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    facts = {"model": found.identity.name, "path": str(out), "to": to, "size_bytes": size_bytes}
    document = {**facts, "proofs": [asdict(one) for one in proofs]}
    if json:
        output.print_json("checkpoint-export", document)
    else:
        output.data().print(exported_text(document), soft_wrap=True)


def card_of(found: "Found", out: Path) -> "Card":
    from clipctl.interop.card import Card

    base = found.model.config.tune.base
    return Card(out.name, found.identity.path, found.metrics, base)


COMMANDS: dict[str, Callable[..., None]] = {"import": import_, "export": export}
