"""How commands are called: the usage line, ways to ask for help, and errors in the command line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

import typer

from clipctl.cli.manual import SHOW_ALL
from clipctl.cli.output import print_problem
from clipctl.errors import ExitCode

_UsageError: Any = typer.BadParameter.__base__  # of Click, which Typer keeps to itself


class Helpful:
    """What all commands and groups have in common."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # After the name of a command, words are for that command.
        if SHOW_ALL in (args[:1] if hasattr(self, "commands") else args):
            ctx.meta[SHOW_ALL] = True
            args = ["--help"]
        with explained(ctx):
            left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return left

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from clipctl.cli.help import show_help

        show_help(self, ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        params: list[Any] = self.params  # type: ignore[attr-defined]
        arguments = [argument_name(param) for param in params if param.param_type_name == "argument"]
        if not hasattr(self, "commands"):
            return ["[OPTIONS]", *arguments]
        return ["[OPTIONS]", "[COMMAND ...]" if getattr(self, "invoke_without_command", False) else "COMMAND ..."]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Click does it; but one suggestion, not three."""
        commands: dict[str, Any] = self.commands  # type: ignore[attr-defined]
        name = args[0]
        if name not in commands and not name.startswith("-"):
            fail(ctx, f"no such command: {name}", get_close_matches(name, commands))
        with explained(ctx):
            return super().resolve_command(ctx, args)  # type: ignore[misc]


def argument_name(param: Any) -> str:
    """RUN, [RUN], RUN... or [RUN...]."""
    name = f"{param.metavar}{'...' if param.nargs != 1 else ''}"
    return name if param.required else f"[{name}]"


@contextmanager
def explained(context: Any) -> Iterator[None]:
    """Turns what Click reports about an invalid command line into `error:` and `hint:` lines."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # help was printed
            raise
        if hasattr(error, "possibilities"):
            fail(context, f"no such option: {error.option_name}", error.possibilities or ())
        fail(context, _number_words(error) or _click_words(error))


def _number_words(error: Any) -> str:
    """Which numbers an option takes, if the error is about one."""
    param: Any = getattr(error, "param", None)
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if annotation not in (int, float) or not error.message:
        return ""
    noun = "a whole number" if annotation is int else "a number"
    low, high = param.min, param.max
    limits = f" between {low:,} and {high:,}" if high is not None else f", {low:,} or more" if low is not None else ""
    return f"{param.opts[0]} must be {noun}{limits}"


def _click_words(error: Any) -> str:
    message = str(error.format_message()).removesuffix(".").replace("'", "")
    return message[:1].lower() + message[1:]


def fail(context: Any, message: str, close: Sequence[str] = ()) -> NoReturn:
    print_problem(message, f"did you mean {close[0]}?" if close else f"see {context.command_path} --help")
    raise typer.Exit(ExitCode.USAGE)
