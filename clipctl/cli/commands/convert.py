"""clipctl checkpoint import | export: models from other libraries, and for them."""

from collections.abc import Callable

from clipctl.cli import options, output


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
        from clipctl.inference.proven_export import card_of
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

    with output.saying(f"reading {model}") as tell:
        from clipctl.inference.proven_export import export

        document = export(model, out, to=to, int8=int8, runs_dir=runs_dir, tell=tell).to_dict()
    if json:
        output.print_json("checkpoint-export", document)
    else:
        output.data().print(exported_text(document), soft_wrap=True)


COMMANDS: dict[str, Callable[..., None]] = {"import": import_, "export": export}
