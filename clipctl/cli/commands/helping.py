"""clipctl help"""

from typing import Any

import typer

from clipctl.cli import options


def help_(context: typer.Context, command: options.CommandWords = None) -> None:
    """Explain a command; the same as COMMAND --help."""
    found: Any = context.find_root()
    for word in command or []:
        with found.scope(cleanup=False):
            name, inner, _ = found.command.resolve_command(found, [word])
        found = type(found)(inner, info_name=name, parent=found)
    found.get_help()
