import dataclasses

import pytest
import yaml

from clipctl.config import layers
from clipctl.config.layers import Layer, load_yaml, parse_assignments, resolve
from clipctl.config.presets import PRESETS
from clipctl.config.quantities import Interval, parse_count
from clipctl.errors import ConfigError


def problems(*layers: Layer) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(layers)
    return [f"{problem} | {problem.hint}" for problem in caught.value.problems]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves_and_survives_yaml(preset):
    config = resolve([Layer("--preset", {"preset": preset})])
    assert config.preset == preset
    assert layers.from_dict(yaml.safe_load(layers.to_yaml(config)), "config.yaml") == config


def test_later_layers_win_over_earlier_ones_and_over_the_preset(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("preset: small\noptim: {lr: 1e-4, weight_decay: 0.5}\n")
    config = resolve([load_yaml(file), Layer("--lr", {"optim.lr": "2e-4"})])
    assert config.optim.lr == 2e-4
    assert config.optim.weight_decay == 0.5
    assert config.train.batch_size == PRESETS["small"]["train.batch_size"]


def test_an_error_names_the_flag_or_else_the_key_and_its_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train: {epochs: 0}\n")
    limits = "must be between 1 and 1,000,000, got '0'"
    assert problems(Layer("--epochs", {"train.epochs": "0"})) == [f"--epochs {limits} | None"]
    assert problems(load_yaml(file)) == [f"train.epochs {limits} ({file}) | None"]


def test_a_preset_flag_replaces_the_files_preset_but_not_its_values(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("preset: small\ntrain:\n  epochs: 3\n")
    config = resolve([load_yaml(file), Layer("--preset", {"preset": "base"})])
    assert (config.preset, config.model.image.depth, config.train.epochs) == ("base", 12, 3)


def test_exponents_without_a_point_are_numbers_in_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("optim:\n  lr: 1e-4\n")
    assert resolve([load_yaml(file)]).optim.lr == 1e-4


def test_all_mistakes_are_reported_together_with_suggestions():
    found = problems(
        Layer("--preset", {"preset": "tinny"}),
        Layer("--set", {"optim.lrr": "1", "optim.lr": "-1", "train.epochs": "many", "runtime.precision": "fp8"}),
    )
    assert found == [
        "unknown preset 'tinny' | did you mean tiny?",
        "unknown key optim.lrr (--set) | did you mean optim.lr?",
        "optim.lr must be between 1e-09 and 10, got '-1' (--set) | None",
        "train.epochs must be a whole number such as 12, 1e6 or 10M, got 'many' (--set) | None",
        "runtime.precision must be one of auto, fp32, bf16, fp16, got 'fp8' (--set) | None",
    ]


def test_a_bare_key_is_recognised():
    assert problems(Layer("--set", {"lr": "1"})) == ["unknown key lr (--set) | did you mean optim.lr?"]


def test_settings_that_contradict_each_other():
    found = problems(Layer("--set", {"model.image.heads": 5, "model.image.size_px": 60}))
    assert len(found) == 2
    assert "not a multiple of model.image.patch_px 8 | the nearest that fits is 64" in found[0]
    assert "--set model.image.heads=4 would fit" in found[1]


@pytest.mark.parametrize("value", ["nan", "inf", "0", "1e300", "", "[1]", "true"])
def test_absurd_learning_rates(value):
    assert problems(Layer("--lr", {"optim.lr": value}))[0].startswith("--lr must be")


def test_optional_settings_take_none():
    assert resolve([parse_assignments(["optim.grad_clip=none", "runtime.threads=auto"])]).optim.grad_clip is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12),
        ("1e6", 10**6),
        ("10M", 10**7),
        ("1_000_000", 10**6),
        ("1.2B", 1_200_000_000),
        ("8G", 8 * 10**9),
        ("2k", 2000),
    ],
)
def test_counts_as_people_write_them(text, expected):
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "150X", "1.5", "1e", "--", "1..2", "1e400"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("optim: [", "is not valid YAML"),
        ("- 1\n- 2\n", "found a list"),
        ("optim:\n  lr: {a: 1}\n", "must be a number"),
        ("optim: 3\n", "unknown key optim "),
        ("\x00", "is not valid YAML"),
        ("preset: [tiny]", "unknown preset"),
        ("[" * 5000, "is not valid YAML"),
        ("optim: {lr: 2024-13-45}", "optim.lr must be a number, got '2024-13-45'"),
        (f"optim: {{lr: {'9' * 400}}}", "optim.lr must be"),
    ],
)
def test_broken_yaml(tmp_path, content, complaint):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        resolve([load_yaml(file)])


def test_missing_yaml_and_directory(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_yaml(tmp_path)


def test_yaml_aliases_cannot_grow(tmp_path):
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 60)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"line 2 is not valid YAML: aliases \(\*name\) are not allowed"):
        resolve([load_yaml(file)])


def test_assignments_need_an_equals_sign():
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        parse_assignments(["optim.lr"])


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve([]).optim.lr = 1  # type: ignore[misc]


def test_a_key_that_stands_twice_is_refused_by_line(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("optim:\n  lr: 1e-3\n  weight_decay: 0.1\n  lr: 1e-4\n")
    with pytest.raises(ConfigError, match=r"line 4 is not valid YAML: the key 'lr' occurs twice"):
        load_yaml(file)


@pytest.mark.parametrize("text", ["5epochs", "500steps", "10min", "2h", "0.5min", "5e", "500s", "10m", "0.00001m"])
def test_an_interval_is_parsed_once_and_written_as_it_was_read(text):
    config = resolve([Layer("--save-every", {"save.every": text})])
    assert config.save.every == Interval.parse(text) == Interval.parse(str(config.save.every))
    assert layers.to_dict(config)["save"]["every"] == str(config.save.every)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("3 steps", "3steps"),
        ("3s", "3steps"),
        ("5e", "5epochs"),
        ("1epoch", "1epoch"),
        ("1m", "1min"),
        ("2h", "120min"),
    ],
)
def test_an_interval_is_written_with_its_unit_in_full(text, written):
    assert str(Interval.parse(text)) == written


@pytest.mark.parametrize("text", ["", "5", "0steps", "1.5steps", "0.5e", "10sec", "5 e3", "-1min", "1h30m"])
def test_an_interval_that_is_none_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"5epochs, 500steps, 10min or 2h"):
        Interval.parse(text)


@pytest.mark.parametrize(("text", "notes"), [("30s", 1), ("30steps", 0), ("30m", 0), ("1e", 0)])
def test_a_bare_s_is_said_to_mean_steps(text, notes):
    found = list(layers.ambiguities([Layer("--save-every", {"save.every": text})]))
    assert len(found) == notes
    assert all("every 30 steps, not seconds; write 30steps" in note for note in found)
