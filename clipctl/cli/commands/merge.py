"""clipctl checkpoint merge"""

from clipctl.cli import options, output
from clipctl.errors import ConfigError


def merge(
    models: options.ModelsToMerge,
    alpha: options.Alphas = None,
    data: options.DataToMergeBy = None,
    out: options.MergedOut = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Interpolate two models, or average several; with several --alpha, evaluate each and keep the best."""
    from clipctl.cli.views.convert import merged_text
    from clipctl.runs.rundir import runs_root

    alphas = parse_alphas(alpha, two=len(models) == 2)
    if out is None and len(alphas) < 2 and data is None:
        raise ConfigError("nothing to do: neither -o nor evaluation data", "add -o DIR, --data DATA, or more --alpha")
    with output.counting("embedding", "reading the models") as (_, progress):
        from clipctl.inference.merging import best_of, candidates, data_to_judge_by, read_models
        from clipctl.interop.card import Card
        from clipctl.interop.export import check_target, export_native

        if out is not None:
            check_target(out)
        found = read_models(runs_root(runs_dir), models)
        source = data_to_judge_by(found, data) if data or len(alphas) > 1 else None
        judged = candidates(found, alphas, source, progress)
        best, names = best_of(judged), [one.identity.name for one in found]
        if out is not None:
            export_native(best.model, out, Card(out.name, f"merged from {', '.join(names)}"))
    document = {
        "models": names,
        "data": None if source is None else source.name,
        "path": None if out is None else str(out),
        "alpha": best.alpha,
        "results": [one.to_dict() for one in judged],
    }
    if json:
        output.print_json("checkpoint-merge", document)
    else:
        output.data().print(merged_text(document), soft_wrap=True)


def parse_alphas(texts: list[str] | None, *, two: bool) -> list[float | None]:
    """Shares of the second of two models, 0.5 unless given; None stands for the average of several."""
    if not two:
        if texts:
            raise ConfigError("--alpha is for two models; more are averaged", "leave out --alpha")
        return [None]
    wrong = ConfigError(f"--alpha must be numbers between 0 and 1, got {' '.join(texts or [])}")
    try:
        values = [float(text) for text in texts or ["0.5"]]
    except ValueError:
        raise wrong from None
    if not all(0 <= value <= 1 for value in values):
        raise wrong
    return list(values)
