"""clipctl doctor"""

import getpass
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

import clipctl
from clipctl.cli import options, output
from clipctl.errors import ExitCode

if TYPE_CHECKING:
    from clipctl.doctor.finding import Finding

STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}
ALWAYS_PASTED = ("Python", "torch", "numpy", "libraries", "processor", "cores", "memory", "accelerator")
PASTE_WIDTH = 78
MARGIN = 8  # the verdict and two gaps


def doctor(issue: options.Issue = False, runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """Check whether this machine is ready for training, and say how to fix any problem; exit 3 if anything is bad."""
    from clipctl.doctor.checkup import checkup
    from clipctl.runs.rundir import runs_root

    with looking():
        findings = checkup(runs_root(runs_dir))
    counts: Counter[str] = Counter(one.verdict for one in findings)
    if json:
        checks = [asdict(one) for one in findings]
        numbers = {verdict: counts[verdict] for verdict in STYLES}
        output.print_json("doctor", {"checks": checks, "counts": numbers, "paste": paste(findings)})
    elif issue:
        output.data().print(output.plain(paste(findings)), soft_wrap=True)
    else:
        console = output.data()
        console.print(table(findings, console.width), soft_wrap=True)
        console.print(f"\n{summary(counts)}")
    if counts["bad"]:
        raise typer.Exit(ExitCode.CHECK)


def looking() -> AbstractContextManager[Any]:
    """Show activity on a terminal: importing torch takes seconds."""
    console = output.prose()
    return console.status("checking this machine") if console.is_terminal else nullcontext()


def table(findings: "list[Finding]", width: int) -> Text:
    """One line per check; long text continues in its own column, with the hint below."""
    name_width = max(len(one.name) for one in findings)
    margin = "\n" + " " * (name_width + MARGIN)
    parts = []
    for one in findings:
        label = [(f"{one.verdict:<4}  ", STYLES[one.verdict]), (f"{one.name:<{name_width}}  ", "bold")]
        lines = [output.plain(line) for line in folded(one.value, width - name_width - MARGIN)]
        if one.way_out:
            hint = folded(f"hint: {one.way_out}", width - name_width - MARGIN)
            lines += [output.plain(line, style="cyan") for line in hint]
        parts.append(Text.assemble(*label, Text(margin).join(lines)))
    return Text("\n").join(parts)


def folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False)


def summary(counts: "Counter[str]") -> str:
    """14 ok, 2 warnings, 0 bad."""
    noun = "warning" if counts["warn"] == 1 else "warnings"
    return f"{counts['ok']} ok, {counts['warn']} {noun}, {counts['bad']} bad"


# --- for an issue ---------------------------------------------------------------------------------------------


def paste(findings: "list[Finding]") -> str:
    """Versions, machine, devices and whatever is not ok, with nothing that identifies the user or the machine."""
    chosen = [one for one in findings if one.verdict != "ok" or one.name in ALWAYS_PASTED]
    name_width = max((len(one.name) for one in chosen), default=0)
    lines = [f"clipctl {clipctl.__version__} on {platform.platform()}"]
    for one in chosen:
        first, *rest = folded(anonymous(one.value).replace("`", "'"), PASTE_WIDTH - name_width - MARGIN)
        lines.append(f"{one.verdict:<4}  {one.name:<{name_width}}  {first}")
        lines += [" " * (name_width + MARGIN) + line for line in rest]
    return "\n".join(["```", *lines, "```"])


def anonymous(text: str) -> str:
    """The text without the home directory, user name and host name."""
    for private, instead in _private_words():
        text = re.sub(rf"(?<![\w.-]){re.escape(private)}(?![\w-])", instead, text, flags=re.IGNORECASE)
    return text


def _private_words() -> Iterator[tuple[str, str]]:
    home = Path.home()
    for place in (home, home.resolve()):
        if place != Path(place.anchor):  # a container's user may live in /
            yield str(place), "~"
    with suppress(OSError, KeyError, ImportError):  # a user id may have no name
        yield getpass.getuser(), "USER"
    if platform.node():
        yield platform.node(), "HOST"
        yield platform.node().split(".")[0], "HOST"
