"""clipctl completion"""

import sys

import typer

from clipctl.cli import options
from clipctl.errors import ConfigError


def completion(context: typer.Context, shell: options.Shell) -> None:
    """Print a script that makes bash, zsh or fish complete commands with Tab."""
    from clipctl.cli.completion import SHELLS, script

    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}", f"shells: {', '.join(SHELLS)}")
    sys.stdout.write(script(shell, context.find_root().command))
