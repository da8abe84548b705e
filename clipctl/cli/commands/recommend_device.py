"""clipctl recommend-device"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clipctl.cli import options, output
from clipctl.errors import ConfigError, ConfigErrors, ExitCode

if TYPE_CHECKING:
    from clipctl.bench.recommend import Question
    from clipctl.hardware.profile import Profile


def recommend_device(
    params: options.Params = None,
    preset: options.PresetOf = None,
    config: options.ConfigOf = None,
    batch_size: options.BatchSizeOf = None,
    precision: options.PrecisionOf = "auto",
    pairs: options.Pairs = None,
    memory: options.MemoryOf = None,
    devices: options.DevicesOf = None,
    results: options.Results = None,
    measure: options.Measure = False,
    json: options.Json = False,
) -> None:
    """Recommend a device for a model, and say why and what would change the answer."""
    question = parse_question(params, preset, config, batch_size, precision, pairs, memory, devices)

    from clipctl.bench.recommend import recommend
    from clipctl.cli.views import recommendation

    if results and measure:
        raise ConfigError("--results describes another machine and --measure this one: pass only one of them")
    if results:
        profile = saved_profile(results)
        memory_bytes = question.memory_bytes or profile.machine.memory_gib * 2**30
        question = replace(question, memory_bytes=memory_bytes)
    else:
        profile = known_profile(question, measure=measure)
    answer = recommend(question, profile)
    if json:
        output.print_json("recommend-device", answer.to_dict())
    else:
        recommendation.show(answer)
    if answer.device is None:
        raise typer.Exit(ExitCode.CHECK)


def parse_question(
    params: str | None,
    preset: str | None,
    config: Path | None,
    batch_size: str | None,
    precision: str,
    pairs: str | None,
    memory: str | None,
    devices: list[str] | None,
) -> "Question":
    """Check the options; all mistakes are reported at once."""
    from clipctl.bench.recommend import Question, model_of_size, nearest_preset
    from clipctl.config.layers import Layer, load_yaml, resolve
    from clipctl.config.quantities import parse_bytes, parse_count
    from clipctl.config.sections import PRECISIONS

    problems: list[ConfigError] = []

    def number(flag: str, text: str | None, low: int, parse: Any = parse_count) -> int | None:
        try:
            value = None if text is None else int(parse(text))
        except (ValueError, OverflowError) as error:
            problems.append(ConfigError(f"{flag} must be {error}, got {text!r}"))
            return None
        if value is not None and value < low:
            problems.append(ConfigError(f"{flag} must be {low:,} or more, got {text!r}"))
            return None
        return value

    count = number("--params", params, 10_000)
    try:
        imagined = model_of_size(count) if count else None
    except ValueError as error:
        problems.append(ConfigError(f"--params must be {error}, got {params!r}"))
    batch, pair_count = number("--batch-size", batch_size, 2), number("--pairs", pairs, 2)
    memory_bytes = number("--memory", memory, 2**20, parse_bytes)
    if precision not in ("auto", *PRECISIONS):
        problems.append(ConfigError(f"--precision must be one of auto, {', '.join(PRECISIONS)}, got {precision!r}"))
    if sum(one is not None for one in (params, preset, config)) != 1:
        problems.append(ConfigError("choose one model: --params 150M, --preset small or --config FILE"))
    if problems:
        raise ConfigErrors(problems)
    layers = [load_yaml(config)] if config else [Layer("--preset", {"preset": preset})] if preset else []
    settings = nearest_preset(count) if count else resolve(layers)
    return Question(
        model=imagined or settings.model,
        batch_size=batch or settings.train.batch_size,
        epochs=settings.train.epochs,
        precision=precision,
        memory_bytes=memory_bytes,
        devices=tuple(part for text in devices for part in text.split(",") if part) if devices else None,
        **({"pairs": pair_count} if pair_count else {}),
    )


def known_profile(question: "Question", *, measure: bool) -> "Profile":
    """The stored profile of this machine; torch is loaded only to find devices the first time, or to measure."""
    from clipctl.hardware.profile import load_profile, update_profile

    profile = load_profile()
    if measure:
        from clipctl.bench.steps import measure_workload
        from clipctl.hardware.processes import interrupts_raised

        with output.saying("measuring") as tell, interrupts_raised():
            measure_workload(question.workload, question.precision, question.devices, tell)
        profile = load_profile()
    if not profile.devices:
        from clipctl.hardware.devices import facts

        found = facts()
        update_profile(lambda kept: kept.with_devices(found))
        profile = profile.with_devices(found)
    return profile


def saved_profile(path: Path) -> "Profile":
    """A profile from `bench --save`, with a warning if it was measured on a different machine or version."""
    from clipctl.bench.recommend import profile_of
    from clipctl.bench.results import load_result
    from clipctl.hardware.profile import Machine

    result = load_result(path)
    for difference in Machine.here().differences(result.machine):
        words = f"warning: {path} was measured on a different machine or version: {difference}"
        output.prose().print(output.plain(words, style="yellow"), soft_wrap=True)
    return profile_of(result)
