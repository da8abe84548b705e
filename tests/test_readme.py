"""The documents keep their promises."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clipctl
from clipctl.bench.results import BenchResult
from clipctl.cli.app import app
from clipctl.cli.manual import EXAMPLES
from clipctl.cli.talk import NEXT_COMMANDS, NEXT_WITH_OWN_DATA
from clipctl.config.layers import LEAVES, Layer, load_yaml, resolve
from clipctl.config.presets import PRESETS
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.hardware.profile import Machine
from clipctl.inference.gallery import open_gallery
from clipctl.inference.refresh import refresh
from clipctl.inference.suspects import Suspicion
from clipctl.interop.card import Card
from clipctl.interop.export import export_libraries
from clipctl.interop.hub import Download
from clipctl.model import cost
from clipctl.model.weights import load_model, save_model
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.plan import make_plan
from tests.conftest import MICRO, train

ROOT = Path(__file__).parent.parent


TASKS = [ROOT / "docs" / f"{task}.md" for task in ("train-on-my-pictures", "fine-tune", "search", "move-the-model")]


# What a reader types after the first of them; `--detach` and `stop` have tests of their own, with real processes.
FOLLOWED = [*TASKS, ROOT / "docs" / "monitor.md"]


def typed(page: Path) -> list[str]:
    """Every line of a page that a reader could type."""
    return re.findall(r"^    (?:\$ )?(?:\S*/)?(clipctl .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def commands() -> list[str]:
    """Those of README, the reference pages and help, and what a finished training suggests."""
    found = [line for page in {ROOT / "README.md", *ROOT.glob("docs/*.md")} - {*TASKS} for line in typed(page)]
    own = [command.format(data="test.csv", place="test.csv", run="a1f3", val="") for _, command in NEXT_WITH_OWN_DATA]
    shown = [line for examples in EXAMPLES.values() for _, line in examples]
    return found + own + shown + [command for _, command in NEXT_COMMANDS]


ONE_LOOK = {"--once", "--json", "--svg"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A place with one run, stopped and ready to go on, as the documents assume."""
    root = tmp_path_factory.mktemp("runs")
    run = RunDir.create(root, "tiny", "20261115-141503-tiny-a1f3")
    train(make_plan(resolve([Layer("test", MICRO)])), run)
    save_model(load_model(CheckpointStore(run).named("last")), run.base_dir, name="base", facts={})
    run.write_status("stopped", attempt=1, step=6, total_steps=6)
    run.release()
    shutil.copytree(run.path, root / "20261116-090000-tiny-b2e4", ignore=shutil.ignore_patterns("run.lock"))
    return root


@pytest.fixture(scope="module")
def place(runs, tmp_path_factory):
    """What docs/use.md assumes: pictures, captions and an index."""
    place = tmp_path_factory.mktemp("place")
    (place / "photos").mkdir()
    source = SyntheticSource(24, seed=0, validation=True)
    for number in range(24):
        source.square(number, 32).save(place / "photos" / f"{number}.jpg")
    source.square(0, 32).save(place / "holiday.jpg")
    rows = "".join(f"photos/{number}.jpg,{source.captions(number)[0]!r}\n" for number in range(24))
    for name in ("test.csv", "captions.csv"):
        (place / name).write_text(f"filepath,caption\n{rows}")
    found = load_model(CheckpointStore(RunDir.find(runs, "a1f3")).named("last"))
    export_libraries(found, place / "clip-vit-b32", ("transformers",), Card("hub", "a run"))
    model = clipctl.load("a1f3", runs_dir=runs)
    refresh(place / "photos.index", model, open_gallery([str(place / "photos")]), ["photos"])
    return place


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_documented_commands_are_accepted(command, monkeypatch, runs, place, tmp_path):
    uses = {"template", "search", "embed", "classify", "eval", "browse", "report", "export", "import", "merge"}
    uses |= {"suspects", "test.csv", "captions.csv", "photos.index"}
    monkeypatch.setattr("clipctl.interop.hub.download", lambda name, **_: Download(place / "clip-vit-b32", "0123abcd"))
    for made in ("my-clip", "merged", "web", "mac"):
        shutil.rmtree(place / made, ignore_errors=True)
    (place / "suspects.csv").unlink(missing_ok=True)
    is_use = bool(uses & set(command.split()))
    monkeypatch.chdir(place if is_use else tmp_path if {"--svg", "--save"} & set(command.split()) else ROOT)
    if command.startswith("clipctl runs r"):  # rm and rename
        runs = shutil.copytree(runs, tmp_path / "copy")
    monkeypatch.setenv("CLIPCTL_RUNS", str(runs))
    arguments = shlex.split(re.split(r" (?:>>?|\|) ", command)[0], comments=True)[1:]
    monkeypatch.setenv("COLUMNS", "120")
    extra = {"train": ["--dry-run"], "monitor": [] if set(arguments) & ONE_LOOK else ["--once"]}
    if arguments[0] == "bench":
        # Minutes of measuring are left out, what was typed is checked.
        monkeypatch.setattr("clipctl.bench.measure.bench", lambda request, tell: BenchResult(Machine.here(), []))
    if arguments[0] == "browse":
        monkeypatch.setattr("clipctl.report.browse.Server.serve_forever", lambda server: None)
        monkeypatch.setattr("webbrowser.open", lambda address: True)
    if "suspects" in arguments:  # the run of this test has built-in pictures, which cannot be wrong
        monkeypatch.setattr("clipctl.inference.suspects.find_suspects", lambda *_, **__: Suspicion([], [], 3))
    if "--measure" in arguments:
        monkeypatch.setattr("clipctl.bench.steps.measure_workload", lambda *_: None)
    done = CliRunner().invoke(app, [*arguments, *extra.get(arguments[0], [])])
    if arguments[0] == "stop":  # the run of this test is not live
        assert done.exit_code == 2 and "running" in done.stderr
    elif arguments[0] == "doctor":  # whatever it finds
        assert done.exit_code in (0, 3) and ("torch" if "--issue" in arguments else " ok, ") in done.output
    else:
        assert done.exit_code == 0, done.output


def test_there_are_commands_to_check():
    assert len(commands()) >= 6 and all(len(typed(page)) >= 6 for page in TASKS)


def shortened(arguments: list[str]) -> list[str]:
    """The same command, in a second: a tiny model for two steps, one look instead of a window."""
    if arguments[0] == "monitor":
        return [*arguments, "--once"]
    if arguments[0] != "train" or "--resume" in arguments:
        return arguments
    if "--time" in arguments:
        where = arguments.index("--time")
        arguments = arguments[:where] + arguments[where + 2 :]
    settings = {} if "--from" in arguments else {key: value for key, value in MICRO.items() if key.startswith("model")}
    assignments = [f"{key}={value}" for key, value in {**settings, "runtime.threads": 1}.items()]
    return [*arguments, "--steps", "2", *(word for one in assignments for word in ("--set", one))]


def test_a_newcomer_can_follow_the_task_pages(place, tmp_path, monkeypatch):
    """Page after page, in a directory that holds pictures and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLIPCTL_RUNS", raising=False)
    monkeypatch.setattr("clipctl.interop.hub.download", lambda name, **_: Download(place / "clip-vit-b32", "0123abcd"))
    monkeypatch.setattr("clipctl.report.browse.Server.serve_forever", lambda server: None)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    source = SyntheticSource(24, seed=0, validation=True)
    (tmp_path / "photos").mkdir()
    rows = [("path", "caption")]
    for number in range(24):
        rows.append((f"photos/{number:04}.jpg", source.captions(number)[0].replace(",", "")))
        source.square(number, 32).save(rows[-1][0])
    (tmp_path / "captions.csv").write_text("".join(f"{path},{caption}\n" for path, caption in rows))
    for command in (command for page in FOLLOWED for command in typed(page)):
        arguments = shlex.split(command.split(" > ")[0].replace("a1f3", "my-photos"), comments=True)[1:]
        if {"--detach", "stop"} & set(arguments):
            continue
        done = CliRunner().invoke(app, shortened(arguments))
        assert done.exit_code == 0, (command, done.output)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_examples_resolve(path):
    resolve([load_yaml(path)])


def test_the_readme_states_the_computed_sizes():
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    for preset in PRESETS:
        millions = cost.parameters(resolve([Layer("--preset", {"preset": preset})]).model) / 1e6
        assert re.search(rf"^\| `{preset}`.*\| {millions:.1f}M \|", table, re.MULTILINE), (preset, millions)


def test_every_key_is_documented():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    missing = [key for key in LEAVES if f"`{key.rsplit('.', 1)[-1]}`" not in text and f"`{key}`" not in text]
    assert not missing


def anchors(path):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documented_links_exist():
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(((?!https?:)[^)]+)\)", path.read_text(encoding="utf-8")):
            name, _, heading = target.partition("#")
            assert (path.parent / name).exists(), (path, target)
            assert not heading or heading in anchors(path.parent / name), (path, target)


def test_no_sample_output_was_left_to_be_filled_in():
    assert not re.search(r"^    \w+ +[A-Z]{4,}$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
