"""How help looks: usage, a dozen options in groups, examples; all options with --help-all."""

from collections.abc import Iterator
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from clipctl.cli.manual import EXAMPLES, FIRST_OPTIONS, SHOW_ALL

NARROW_COLUMNS = 60  # below, the explanation stands under the name
LONGEST_NAME = 24  # a longer name has its line for itself
LIST_LENGTH = 8  # so many options need no groups

Row = tuple[str, str]  # a name and what it means
Sections = dict[str, list[Row]]


def show_help(command: Any, context: Any) -> None:
    """Print the help of a command; if --help-all was given, with all options and their environment variables."""
    console = Console(highlight=False)
    found = sections(command, path_of(context), wants_all=context.meta.get(SHOW_ALL, False))
    usage = " ".join(command.get_usage(context).split())
    lines = [*indented(usage, console.width, 0, style="bold"), Text("")]
    lines += indented(_paragraph(command.help), console.width, 2)
    lines += section_lines(found, console.width)
    if examples := EXAMPLES.get(path_of(context)):
        lines += [Text(""), Text("Examples", style="bold")]
        for words, line in examples:
            lines += indented(words if words.endswith("?") else f"{words}:", console.width, 2)
            lines += indented(line, console.width, 4, style="cyan")
    console.print(Text("\n").join(lines), soft_wrap=True)


def path_of(context: Any) -> str:
    """The words that call the command, without the program: `checkpoint show`."""
    names = []
    while context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(reversed(names))


def sections(command: Any, path: str, *, wants_all: bool) -> Sections:
    """Everything that may follow the command, by title."""
    visible = [param for param in command.params if not param.hidden]
    arguments = [param for param in visible if param.param_type_name == "argument"]
    options = [param for param in visible if param.param_type_name == "option"]
    first = FIRST_OPTIONS.get(path)
    shown = options if wants_all or first is None else [param for param in options if first & {*param.opts}]
    commands = getattr(command, "commands", {})
    found: Sections = {
        "Commands": [(name, _paragraph(one.help)) for name, one in commands.items() if not one.hidden],
        "Arguments": [(param.metavar, param.help) for param in arguments],
    }
    # Groups of one or two, or beside a rest that is in none, would be harder to read than a list.
    has_groups = len(shown) > LIST_LENGTH and all(param.rich_help_panel for param in shown)
    for param in shown:
        title = param.rich_help_panel if has_groups else "Options"
        found.setdefault(title, []).append((_name(param), _meaning(param, wants_all=wants_all)))
    help_rows = _help_rows(options, left_out=len(options) - len(shown), wants_all=wants_all)
    found.setdefault("Help" if has_groups else "Options", []).extend(help_rows)
    return {title: rows for title, rows in found.items() if rows}


def _help_rows(options: list[Any], *, left_out: int, wants_all: bool) -> Iterator[Row]:
    yield "-h, --help", "Show this help."
    if left_out:
        yield SHOW_ALL, f"Show the other {left_out} options, too."
    elif not wants_all and any(param.envvar for param in options):
        yield SHOW_ALL, "Show environment variables, too."


def _name(param: Any) -> str:
    return f"{', '.join(sorted(param.opts, key=len))} {param.metavar}".rstrip()


def _meaning(param: Any, *, wants_all: bool) -> str:
    words: str = param.help
    if param.show_default and param.default not in (None, False):
        default = f"{param.default:g}" if isinstance(param.default, float) else param.default
        words = f"{words.removesuffix('.')}; default: {default}."
    return f"{words} [{param.envvar}]" if wants_all and param.envvar else words


def _paragraph(help: str | None) -> str:
    """The first paragraph in one line."""
    return " ".join((help or "").split("\n\n")[0].split())


def section_lines(found: Sections, width: int) -> Iterator[Text]:
    """Names with their meanings beside them, or below them if there is no room."""
    names = [name for rows in found.values() for name, _ in rows]
    longest = max(len(name) for name in names if len(name) <= LONGEST_NAME)
    column = 6 if width < NARROW_COLUMNS else longest + 4
    for title, rows in found.items():
        yield from (Text(""), Text(title, style="bold"))
        for name, words in rows:
            label = Text(f"  {name}", style="cyan")
            folded = indented(words, width, column)
            if len(label) <= column - 2:
                label.append(folded.pop(0).plain[len(label) :], style="none")
            yield from (label, *folded)


def indented(words: str, width: int, indent: int, style: str = "") -> list[Text]:
    margin = " " * indent
    wrapper = TextWrapper(
        max(width - 1, indent + 10), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
    return [Text(line, style=style) for line in wrapper.wrap(words) or [margin]]
