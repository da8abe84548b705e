"""Help: what a beginner sees, examples that work, and what is said to a command line that is wrong."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.cli.completion import commands
from clipctl.cli.manual import EXAMPLES, FIRST_OPTIONS, MOST_OPTIONS

ROOT = get_command(app)
PATHS = [" ".join(one.path) for one in commands(ROOT)]


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment, prog_name="clipctl")


def command_at(path):
    found = ROOT
    for word in path.split():
        found = found.commands[word]
    return found


def options_of(path):
    return [param for param in command_at(path).params if param.param_type_name == "option"]


@pytest.mark.parametrize("path", PATHS)
def test_every_command_has_examples_that_parse(path):
    assert 2 <= len(EXAMPLES[path]) <= 4
    for _, line in EXAMPLES[path]:
        words = shlex.split(re.split(r" (?:>>?|\|) ", line)[0])
        assert words[: 1 + len(path.split())] == ["clipctl", *path.split()]
        command, rest = ROOT, words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context("clipctl", rest).close()


def test_examples_are_of_commands_that_exist():
    assert set(EXAMPLES) == set(PATHS) and set(FIRST_OPTIONS) <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("columns", ["40", "100"])
def test_help_is_readable(path, columns):
    text = invoke(*path.split(), "--help-all", COLUMNS=columns).stdout
    assert text.startswith("Usage: clipctl") and "Examples" in text
    assert not re.search(r"<\w|\[\[|\]\.\.\.|\{[A-Z]|env var:|<=x", text)
    assert max(map(len, text.splitlines())) <= int(columns)
    for param in options_of(path):
        assert param.opts[0] in text and param.metavar is not None, param.opts
        assert not param.envvar or param.envvar in text


@pytest.mark.parametrize("path", PATHS)
def test_short_help_has_few_options_and_says_where_the_others_are(path):
    text, options = invoke(*path.split(), "--help").stdout, options_of(path)
    shown = re.findall(r"^  (?:-\w, )?(-\S+)", text, re.MULTILINE)
    assert len(set(shown) - {"--help", "--help-all"}) <= MOST_OPTIONS
    assert ("other" in text and "--help-all" in text) or len(options) <= MOST_OPTIONS
    assert "CLIPCTL_" not in text
    assert FIRST_OPTIONS.get(path, set()) <= {name for param in options for name in param.opts}


def test_options_behind_help_all_are_completed():
    assert "--micro-batch" not in invoke("train", "--help").stdout
    assert "--micro-batch" in invoke("completion", "bash").stdout


@pytest.mark.parametrize("path", ["", "train", "checkpoint show"])
def test_the_command_help_is_the_option_help(path):
    assert invoke("help", *path.split()).stdout.strip() == invoke(*path.split(), "--help").stdout.strip()


def test_version():
    assert invoke("-V").stdout == invoke("--version").stdout and invoke("-V").stdout.startswith("clipctl ")


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("train --epoch 3", "no such option: --epoch", "did you mean --epochs?"),
        ("train --batch 3", "no such option: --batch", "did you mean --batch-size?"),
        ("trian", "no such command: trian", "did you mean train?"),
        ("help chekpoint", "no such command: chekpoint", "did you mean checkpoint?"),
        ("checkpoint shw", "no such command: shw", "did you mean show?"),
        ("train --set optim.lrr=1", "unknown key optim.lrr (--set)", "did you mean optim.lr?"),
        ("train --preset samll", "unknown preset 'samll'", "did you mean small?"),
        ("search", "missing argument INDEX", "see clipctl search --help"),
        ("search a b --top x", "--top must be a whole number between 1 and 100,000", "see clipctl search --help"),
        ("--foo", "no such option: --foo", "see clipctl --help"),
    ],
)
def test_a_wrong_command_line_gets_one_suggestion(words, problem, hint):
    done = invoke(*words.split())
    assert done.exit_code == 2
    assert done.stderr == f"error: {problem}\nhint: {hint}\n"
