"""clipctl checkpoint import | export: models from other libraries, and for them."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipctl.cli import options, output
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from clipctl.interop.card import Card
    from clipctl.interop.models import Found
    from clipctl.progress import Tell

FORMATS = ("transformers", "open_clip", "both", "safetensors", "onnx", "coreml")


def import_(
    model: options.Model,
    out: options.ModelOut,
    tokenizer: options.TokenizerFile = None,
    activation: options.Activation = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Import a transformers, open_clip or OpenAI model, from a directory or the hub."""
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
    int8: options.Int8 = False,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Export a model for other programs, and check that it gives the same results there."""
    from clipctl.cli.views.convert import exported_text
    from clipctl.runs.rundir import runs_root

    if to not in FORMATS:
        raise ConfigError(f"--to must be one of {', '.join(FORMATS)}, got {to!r}")
    if int8 and to != "onnx":
        raise ConfigError(f"--int8 is for --to onnx, not for --to {to}")
    with output.saying(f"reading {model}") as tell:
        from clipctl.interop.export import check_target
        from clipctl.interop.models import load_any

        check_target(out)
        found = load_any(runs_root(runs_dir), model, tell=tell)
        tell(f"writing {out}")
        libraries = written(found, out, to, int8=int8)
        checked = judged(found, out, libraries, int8=int8, tell=tell)
    size_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    document = {"model": found.identity.name, "path": str(out), "to": to, "size_bytes": size_bytes, **checked}
    if json:
        output.print_json("checkpoint-export", document)
    else:
        output.data().print(exported_text(document), soft_wrap=True)


def written(found: "Found", out: Path, to: str, *, int8: bool) -> tuple[str, ...]:
    """Write an export; returns the libraries that it is for."""
    from clipctl.interop import export as exports

    card = card_of(found, out)
    if to == "onnx":
        from clipctl.interop.onnx import export_onnx

        export_onnx(found.model, out, card, found.identity.fingerprint, int8=int8)
        return ("onnxruntime", "onnxruntime int8") if int8 else ("onnxruntime",)
    if to == "coreml":
        from clipctl.interop.coreml import export_coreml

        export_coreml(found.model, out, card)
        return ("coremltools",)
    if to == "safetensors":
        exports.export_native(found.model, out, card)
        return ()
    exports.export_libraries(found.model, out, exports.LIBRARIES[to], card)
    return exports.LIBRARIES[to]


def judged(found: "Found", out: Path, libraries: tuple[str, ...], *, int8: bool, tell: "Tell") -> dict[str, Any]:
    """The proof that an export computes the same; with 8-bit weights, also what they cost and gain."""
    from clipctl.interop.proof import prove

    if not libraries:
        return {"proofs": []}
    tell("comparing with the libraries that read it")
    proofs: dict[str, Any] = {"proofs": [asdict(one) for one in prove(found.model, out, libraries)]}
    if not int8:
        return proofs
    from clipctl.inference.rounding import compare

    data, rows = compare(out, tell)
    return {**proofs, "judged_on": data, "precisions": [asdict(one) for one in rows]}


def card_of(found: "Found", out: Path) -> "Card":
    from clipctl.interop.card import Card

    base = found.model.config.tune.base
    return Card(out.name, found.identity.path, found.metrics, base)


COMMANDS: dict[str, Callable[..., None]] = {"import": import_, "export": export}
