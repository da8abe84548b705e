"""The command line: one app, one place where errors become messages and exit codes."""

import errno
import os
import sys
from typing import Annotated, Any

import typer

import clipctl
from clipctl.cli.commands import (
    bench,
    browse,
    checkpoint,
    classify,
    completion,
    convert,
    data,
    doctor,
    embed,
    evaluate,
    helping,
    merge,
    monitor,
    recommend_device,
    report,
    runs,
    search,
    train,
)
from clipctl.cli.output import print_problem, prose
from clipctl.cli.startup import LightCommand, LightGroup, SpreadCommand
from clipctl.errors import ClipctlError, ExitCode, Terminated, unreadable

# What is wrong is the file, or its name, and not the disk or clipctl.
THE_FILES_FAULT = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


class Commands(LightGroup):
    """Turns every failure into `error:` and `hint:` lines and an exit code. CLIPCTL_DEBUG=1 shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ClipctlError as error:
            _show_traceback()
            for problem in error.problems:
                print_problem(str(problem), problem.hint)
            raise typer.Exit(error.exit_code) from None
        except Terminated:
            print_problem("terminated", None)
            raise typer.Exit(ExitCode.TERMINATED) from None
        except KeyboardInterrupt:
            print_problem("interrupted", None)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has left, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.FAILURE) from None
        except OSError as error:
            _show_traceback()
            if error.filename and error.errno in THE_FILES_FAULT:
                problem = unreadable(error.filename, error)
                print_problem(str(problem), problem.hint)
                raise typer.Exit(problem.exit_code) from None
            where = f": {error.filename}" if error.filename else ""
            print_problem(f"{error.strerror or error}{where}", None)
            raise typer.Exit(ExitCode.FAILURE) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if type(error).__module__.startswith("typer."):  # usage errors, which Typer prints itself
                raise
            _show_traceback()
            hint = "this is a bug in clipctl; CLIPCTL_DEBUG=1 shows where; please report it"
            print_problem(f"{type(error).__name__}: {error}", hint)
            raise typer.Exit(ExitCode.FAILURE) from None


app = typer.Typer(
    cls=Commands,
    name="clipctl",
    help="Train CLIP models on the machine you own.",
    no_args_is_help=True,
    add_completion=False,  # its two options would make every command import pydantic too
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=train.TrainCommand)(train.train)
checkpoints = typer.Typer(
    cls=Commands, help="List, verify, compare, merge, import and export checkpoints.", no_args_is_help=True
)
checkpoints.command("merge", cls=SpreadCommand)(merge.merge)
for name, command in {**checkpoint.COMMANDS, **convert.COMMANDS}.items():
    checkpoints.command(name, cls=LightCommand)(command)
app.add_typer(checkpoints, name="checkpoint")
datasets = typer.Typer(cls=Commands, help="Inspect pictures and captions, and find wrong ones.", no_args_is_help=True)
datasets.command("inspect", cls=LightCommand)(data.inspect)
datasets.command("template", cls=LightCommand)(data.template)
datasets.command("suspects", cls=LightCommand)(data.suspects)
app.add_typer(datasets, name="data")
app.command("classify", cls=LightCommand)(classify.classify)
app.command("eval", cls=LightCommand)(evaluate.evaluate)
app.command("embed", cls=LightCommand)(embed.embed)
app.command("search", cls=LightCommand)(search.search)
app.command("browse", cls=LightCommand)(browse.browse)
app.command("bench", cls=SpreadCommand)(bench.bench)
app.command("doctor", cls=LightCommand)(doctor.doctor)
app.command("recommend-device", cls=SpreadCommand)(recommend_device.recommend_device)
app.command("monitor", cls=LightCommand)(monitor.monitor)
app.command("report", cls=LightCommand)(report.report)
history = typer.Typer(cls=Commands, invoke_without_command=True, callback=monitor.runs)
history.command("export", cls=LightCommand)(monitor.export)
for name, command in runs.COMMANDS.items():
    history.command(name, cls=LightCommand)(command)
app.add_typer(history, name="runs")
app.command("stop", cls=LightCommand)(monitor.stop)
app.command("completion", cls=LightCommand)(completion.completion)
app.command("help", cls=LightCommand)(helping.help_)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clipctl {clipctl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _show_traceback() -> None:
    if os.environ.get("CLIPCTL_DEBUG"):
        prose().print_exception()
