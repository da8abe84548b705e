"""clipctl recommend-device"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clipctl.cli import options, output
from clipctl.errors import ConfigError, ConfigErrors, ExitCode

if TYPE_CHECKING:
    from clipctl.bench.recommend import Question, Recommendation
    from clipctl.bench.scaling import Scale
    from clipctl.hardware.profile import Profile
    from clipctl.model.communication import Network


def recommend_device(
    params: options.Params = None,
    preset: options.PresetOf = None,
    config: options.ConfigOf = None,
    batch_size: options.BatchSizeOf = None,
    precision: options.PrecisionOf = "auto",
    pairs: options.Pairs = None,
    memory: options.MemoryOf = None,
    devices: options.DevicesOf = None,
    nodes: options.Nodes = None,
    bandwidth: options.Bandwidth = "1Gbps",
    price: options.Price = None,
    results: options.Results = None,
    measure: options.Measure = False,
    json: options.Json = False,
) -> None:
    """Recommend a device for a model, and say why and what would change the answer."""
    network = parse_network(bandwidth)
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
    scales = scales_of(answer, question, profile, nodes, network, price) if nodes else []
    if json:
        scaling = {"scaling": [one.to_dict() for one in scales]} if nodes else {}
        output.print_json("recommend-device", answer.to_dict() | scaling)
    else:
        recommendation.show(answer)
        if nodes:
            recommendation.show_scaling(scales, nodes, bandwidth)
    if answer.device is None:
        raise typer.Exit(ExitCode.CHECK)


def parse_network(bandwidth: str) -> "Network":
    from clipctl.config.quantities import parse_bandwidth
    from clipctl.model.communication import BETWEEN

    try:
        return replace(BETWEEN, bytes_per_s=parse_bandwidth(bandwidth))
    except ValueError as error:
        raise ConfigError(f"--bandwidth must be {error}, got {bandwidth!r}") from None


def scales_of(
    answer: "Recommendation",
    question: "Question",
    profile: "Profile",
    nodes: int,
    network: "Network",
    price: float | None,
) -> "list[Scale]":
    """Forecasts for several machines like this one, with the recommended device."""
    from clipctl.bench.scaling import node_counts, scale

    setting = next((one.ranked.setting for one in answer.candidates if one.device == answer.device), None)
    return scale(question, profile, setting, node_counts(nodes), network, price) if setting else []


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
            # Nobody means 8 bytes.
            hint = f"did you mean {text}G?" if parse is parse_bytes and str(text).isdigit() else None
            least = "1M" if parse is parse_bytes else f"{low:,}"
            problems.append(ConfigError(f"{flag} must be {least} or more, got {text!r}", hint))
            return None
        return value

    count = number("--params", params, 10_000)
    try:
        assumed = model_of_size(count) if count else None
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
        model=assumed or settings.model,
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
