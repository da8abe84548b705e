"""From files and flags to one TrainConfig: layers of dotted keys, each over the one before.

The layers, lowest first: preset, YAML file, flags, --set. Each value is parsed by the type of its field, and all
mistakes are reported together.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import yaml

from clipctl import files
from clipctl.config.presets import PRESETS
from clipctl.config.quantities import Interval, parse_count
from clipctl.config.sections import TrainConfig
from clipctl.errors import ConfigError, ConfigErrors

CONFIG_FILE_LIMIT_BYTES = 100_000
SHOWN_CHARACTERS = 60  # of a value, in a message
NODE_LIMIT = 5_000  # values and keys in a config file
DEPTH_LIMIT = 20
REPORTED_PROBLEMS = 20
TIME, EPOCHS, STEPS = LENGTHS = ("train.time", "train.epochs", "train.steps")


@dataclass(frozen=True)
class Layer:
    """Settings from one place. `origin` names it in error messages: a file, a flag."""

    origin: str
    values: Mapping[str, Any]  # dotted key -> value as found

    def name_of(self, key: str) -> str:
        """What the user wrote to set this key: the flag, if it was one."""
        return self.origin if self.is_flag else key

    @property
    def is_flag(self) -> bool:
        return self.origin.startswith("--") and self.origin != "--set"


def resolve(layers: Sequence[Layer]) -> TrainConfig:
    """One config from layers, later ones over earlier ones, over the preset named by the last layer that names one."""
    problems: list[ConfigError] = []
    preset = next((layer.values["preset"] for layer in reversed(layers) if "preset" in layer.values), "tiny")
    if not isinstance(preset, str) or preset not in PRESETS:
        problems.append(ConfigError(f"unknown preset {shown(preset)}", _suggestion(preset, list(PRESETS), "presets")))
        preset = "tiny"
    values: dict[str, Any] = {"preset": preset}
    for layer in [Layer("preset", PRESETS[preset]), *layers]:
        said = _lengths_of(layer)  # what is said later counts; within a layer, steps count more than epochs
        for key in (TIME, STEPS):
            if said and key not in said:
                values.pop(key, None)
        for key, raw in layer.values.items():
            if len(problems) >= REPORTED_PROBLEMS:
                break
            if key == "preset":
                continue
            leaf = LEAVES.get(key)
            if leaf is None:
                problems.append(ConfigError(f"unknown key {key[:SHOWN_CHARACTERS]}{_from(layer)}", _suggest_key(key)))
                continue
            try:
                values[key] = leaf.parse(raw)
            except (ValueError, OverflowError) as error:
                where = "" if layer.is_flag else _from(layer)
                problems.append(ConfigError(f"{layer.name_of(key)} must be {error}, got {shown(raw)}{where}"))
    names = {key: layer.name_of(key) for layer in layers for key in layer.values}
    problems += _contradictions(values, names)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
    return typing.cast(TrainConfig, _build(TrainConfig, values, ""))


def check_length(layers: Sequence[Layer]) -> None:
    """Raise if the command line sets the length of training in two ways."""
    typed = [layer for layer in layers if layer.origin.startswith("--")]
    said = [(key, *found) for key in LENGTHS if (found := _last_said(typed, key))]
    if len(said) > 1:
        words = " and ".join(_typed(*one) for one in said[:2])
        raise ConfigError(f"{words} both say how long to train", "choose one")


def lengths(layers: Sequence[Layer]) -> list[str]:
    """By which keys the length of training is set: those of the last layer that says anything about it."""
    return next((said for layer in reversed(layers) if (said := _lengths_of(layer))), [])


def _lengths_of(layer: Layer) -> list[str]:
    return [key for key in LENGTHS if _last_said([layer], key)]


def _last_said(layers: Sequence[Layer], key: str) -> tuple[Layer, Any] | None:
    said = [(layer, layer.values[key]) for layer in layers if layer.values.get(key) not in (None, "", "none", "null")]
    return said[-1] if said else None


def _typed(key: str, layer: Layer, value: Any) -> str:
    return f"--set {key}={value}" if layer.origin == "--set" else f"{layer.origin} {value}"


def ambiguities(layers: Sequence[Layer]) -> Iterator[str]:
    """How each setting that is easily misread was understood, and how to write it."""
    for key, other in permutations(LENGTHS, 2):
        said, before = _last_said(layers, key), _last_said(layers, other)
        if said and before and layers.index(said[0]) > layers.index(before[0]):
            yield f"{_typed(key, *said)} replaces {other} {before[1]} from {before[0].origin}"
    for layer in layers:
        text = layer.values.get("save.every")
        if isinstance(text, str) and Interval.is_ambiguous(text):
            interval = Interval.parse(text)
            yield f"save.every {text} means every {interval.count:g} steps, not seconds; write {interval}"


class _Loader(yaml.BaseLoader):
    """Strings, lists and mappings: each setting decides what its string means, so nothing becomes a date and 1:30 is
    not 90. Aliases, with which a small file can grow without end, are refused, and so is a repeated key."""

    nodes = depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", mark)
        if self.nodes > NODE_LIMIT:
            raise yaml.composer.ComposerError(None, None, f"more than {NODE_LIMIT:,} values", mark)
        if self.depth > DEPTH_LIMIT:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not text", key.start_mark)
            if key.value in seen:
                problem = f"the key {shown(key.value)} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path, *, follows_links: bool = True) -> Layer:
    """The settings of a YAML file as a layer. In a run, which may be a copy from elsewhere, links are not followed."""
    try:
        content = files.read_bounded(path.resolve() if follows_links else path, CONFIG_FILE_LIMIT_BYTES)
        document = yaml.load(content.decode(), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"no such config file: {path}", "examples/tiny.yaml shows what one looks like") from None
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8") from None
    except (ValueError, RecursionError):  # such as an impossible date, or ten thousand brackets
        raise ConfigError(f"{path} is not valid YAML: unreadable value") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(
            f"{path}{line} is not valid YAML: {getattr(error, 'problem', None) or 'unreadable'}"
        ) from None
    if document is None or document == "":
        document = {}
    if not isinstance(document, dict):
        kind = "list" if isinstance(document, list) else "text"
        raise ConfigError(f"{path} must contain keys and values, found a {kind}")
    return Layer(str(path), dict(_flatten(document, "")))


def parse_assignments(assignments: Sequence[str]) -> Layer:
    """`--set key=value` arguments as a layer."""
    problems = [
        ConfigError(f"--set {text!r} is not KEY=VALUE", "for example --set optim.lr=1e-3")
        for text in assignments
        if "=" not in text
    ]
    if problems:
        raise ConfigErrors(problems)
    pairs = (text.split("=", 1) for text in assignments)
    return Layer("--set", {key.strip(): value.strip() for key, value in pairs})


def to_dict(config: Any) -> dict[str, Any]:
    """A config, or one of its sections, as JSON and YAML can hold it."""
    values = ((item.name, getattr(config, item.name)) for item in dataclasses.fields(config))
    return {name: to_dict(value) if _is_section(type(value)) else _written(value) for name, value in values}


def _written(value: Any) -> Any:
    return str(value) if isinstance(value, Interval) else value


def to_layer(config: TrainConfig) -> Layer:
    """Every setting of a config, by its dotted key."""
    return Layer("config", dict(_flatten(to_dict(config), "")))


def from_dict(values: Mapping[str, Any], origin: str) -> TrainConfig:
    """The config that `to_dict` or a saved config.yaml describes."""
    return resolve([Layer(origin, dict(_flatten(values, "")))])


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


# --- one value ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One setting: how its value is written and which values are allowed."""

    kind: Any  # int, float, bool, str, Interval, a tuple of str or of float, or a Literal
    optional: bool
    low: float | None
    high: float | None
    check: Callable[[str], Any] | None  # of a text: raises ValueError saying what is expected
    convert: Callable[[str], str] | None  # of a text: how it is kept

    def parse(self, raw: Any) -> Any:
        """The value that `raw` (from YAML, a flag or Python) stands for. Raises ValueError saying what is expected."""
        if self.optional and (raw is None or str(raw).lower() in ("", "none", "null", "auto")):
            return None
        if typing.get_origin(self.kind) is Literal:
            choices = typing.get_args(self.kind)
            if raw not in choices:
                raise ValueError(f"one of {', '.join(choices)}")
            return raw
        if self.kind is bool:
            return _parse_bool(raw)
        if self.kind is str:
            return self._parse_text(raw)
        if self.kind is Interval:
            return raw if isinstance(raw, Interval) else Interval.parse(self._parse_text(raw))
        if self.kind == tuple[str, ...]:
            return tuple(self._parse_text(one) for one in (raw if isinstance(raw, list | tuple) and raw else [raw]))
        if self.kind == tuple[float, ...]:
            return self._parse_colour(raw)
        return self._parse_number(raw)

    def _parse_text(self, raw: Any) -> str:
        if not isinstance(raw, str) or not raw:
            raise ValueError("text")
        if self.check:
            self.check(raw)
        return self.convert(raw) if self.convert else raw

    def _parse_colour(self, raw: Any) -> tuple[float, ...]:
        values = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(values, list | tuple) or len(values) != 3:
            raise ValueError("three numbers, for red, green and blue")
        return tuple(float(self._parse_number(one)) for one in values)

    def _parse_number(self, raw: Any) -> int | float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError("a number")
        value: int | float
        if self.kind is int:
            value = parse_count(raw)
        else:
            is_percent = isinstance(raw, str) and raw.endswith("%")
            try:
                value = float(raw[:-1]) / 100 if is_percent else float(raw)  # type: ignore[index]
            except ValueError:
                raise ValueError("a number") from None
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise ValueError(f"between {_limit(self.low)} and {_limit(self.high)}")
        return value


def _limit(number: float | None) -> str:
    """1,000,000 or 0.5; 1e+18 stays as it is."""
    return f"{number:,.0f}" if number is not None and number == int(number) and abs(number) < 1e12 else f"{number:g}"


def _parse_bool(raw: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        return words[str(raw).lower()]
    except KeyError:
        raise ValueError("true or false") from None


# --- plumbing -------------------------------------------------------------------------------------------------


def _sections(cls: type) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield item.name, hints[item.name], item


def _is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and kind is not Interval


def _find_leaves(cls: type, prefix: str) -> Iterator[tuple[str, Leaf]]:
    for name, kind, item in _sections(cls):
        if _is_section(kind):
            yield from _find_leaves(typing.cast(type, kind), f"{prefix}{name}.")
            continue
        optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
        if optional:
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        limits = (item.metadata.get(key) for key in ("low", "high", "check", "convert"))
        yield f"{prefix}{name}", Leaf(kind, optional, *limits)


LEAVES: dict[str, Leaf] = dict(_find_leaves(TrainConfig, ""))
_SECTIONS = {key.rsplit(".", depth)[0] for key in LEAVES for depth in range(1, key.count(".") + 1)}


def _flatten(document: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested document. Only known sections are entered, so that a hostile file cannot grow."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _flatten(value, f"{key}.")
        elif not (value in (None, "") and key in _SECTIONS):  # an empty section says nothing
            yield key, value


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    arguments = {}
    for name, kind, _ in _sections(cls):
        key = f"{prefix}{name}"
        if _is_section(kind):
            arguments[name] = _build(typing.cast(type, kind), values, f"{key}.")
        elif key in values:
            arguments[name] = values[key]
    return cls(**arguments)


def _contradictions(values: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[ConfigError]:
    """Settings that are fine one by one but not together, under the names that the user gave them."""
    config = _build(TrainConfig, values, "")
    image, text = config.model.image, config.model.text
    if image.size_px % image.patch_px:
        yield ConfigError(
            f"model.image.size_px {image.size_px} is not a multiple of model.image.patch_px {image.patch_px}",
            f"the nearest that fits is {max(1, round(image.size_px / image.patch_px)) * image.patch_px}",
        )
    if image.stem == "conv" and (image.patch_px < 2 or image.patch_px & (image.patch_px - 1)):
        yield ConfigError(
            f"model.image.patch_px {image.patch_px} is not a power of two, which a conv stem needs",
            f"--set model.image.patch_px={max(2, 2 ** round(math.log2(image.patch_px)))} would fit",
        )
    if image.pool == "class" and image.depth == 0:
        yield ConfigError("model.image.pool class needs a model.image.depth of 1 or more", "set model.image.pool=flat")
    if config.tune.is_partial and config.tune.base is None:
        key = "tune.lock" if config.tune.lock else "tune.lora"
        yield ConfigError(f"{names.get(key, key)} needs a model to start from", "name one with --from MODEL")
    if config.layout == "clip" and not image.is_clip_layout:
        key, needed = ("stem", "patches") if image.stem != "patches" else ("pool", "class")
        layout = names.get("layout", "layout")
        yield ConfigError(
            f"{layout} clip needs model.image.{key} {needed}, not {getattr(image, key)}",
            f"leave out either {layout} or model.image.{key}",
        )
    loop = config.train
    # A recipe chooses the batch size where nobody did, and comes as a layer of its own.
    has_batch = config.recipe == "plain" or "preset" in names or "train.batch_size" in names
    if has_batch and loop.micro_batch and loop.micro_batch > loop.batch_size:
        part, whole = (names.get(key, key) for key in ("train.micro_batch", "train.batch_size"))
        yield ConfigError(
            f"{part} {loop.micro_batch} is larger than {whole} {loop.batch_size}",
            "a micro-batch is a part of a batch: leave it out to let memory decide",
        )
    if loop.label_smoothing and loop.loss == "sigmoid":
        smoothing, loss = (names.get(key, key) for key in ("train.label_smoothing", "train.loss"))
        yield ConfigError(f"{smoothing} needs {loss} softmax", f"leave out either {smoothing} or {loss}")
    for name, tower in (("image", image), ("text", text)):
        if tower.width % tower.heads:
            fitting = [heads for heads in range(1, tower.width + 1) if tower.width % heads == 0]
            nearest = min(fitting, key=lambda heads: abs(heads - tower.heads))
            yield ConfigError(
                f"model.{name}.width {tower.width} is not a multiple of model.{name}.heads {tower.heads}",
                f"--set model.{name}.heads={nearest} would fit",
            )


def shown(value: Any) -> str:
    """A value for a message, cut off if it is long."""
    text = repr(value[:SHOWN_CHARACTERS] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _from(layer: Layer) -> str:
    return f" ({layer.origin})"


def _suggestion(word: Any, known: Sequence[str], noun: str) -> str:
    close = difflib.get_close_matches(str(word)[:SHOWN_CHARACTERS], known, n=1)
    return f"did you mean {close[0]}?" if close else f"{noun}: {', '.join(known)}"


def _suggest_key(key: str) -> str:
    """A similar key; else one whose last part is the same (`lr` for `optim.lr`); else the keys of that section."""
    key = key[:SHOWN_CHARACTERS]
    close = difflib.get_close_matches(key, LEAVES, n=1)
    same_name = [known for known in LEAVES if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_name or close:
        return f"did you mean {(same_name or close)[0]}?"
    section = key.split(".", 1)[0]
    inside = [known for known in LEAVES if known.startswith(f"{section}.")]
    return f"known keys: {', '.join(inside or LEAVES)}"
