"""Completion scripts for shells: static, made from the commands themselves, so that Tab starts no Python."""

from collections.abc import Iterator
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh", "fish")
# What a run may be completed to: the names of the runs that are there.
RUNS = 'ls -1 "${CLIPCTL_RUNS:-runs}" 2>/dev/null'
FISH_RUNS = "(ls -1 (set -q CLIPCTL_RUNS; and echo $CLIPCTL_RUNS; or echo runs) 2>/dev/null)"


class Command(NamedTuple):
    """A command: the words that call it, and what may follow them."""

    path: tuple[str, ...]
    help: str
    subcommands: dict[str, str]  # with their help
    options: dict[str, str]
    values: tuple[str, ...]  # of its argument, if they are known


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """The command of a Typer app, as Click sees it, and all below it."""
    below = dict(getattr(group, "commands", {}))
    options = {
        name: _line(getattr(one, "help", ""))
        for one in group.params
        for name in one.opts
        if name.startswith("--") and not getattr(one, "hidden", False)
    }
    names = {name: _line(one.help) for name, one in below.items()}
    options |= {"--help": "Show help.", "--help-all": "Show all options."}
    yield Command(path, _line(group.help), names, options, SHELLS if path == ("completion",) else ())
    for name, one in below.items():
        yield from commands(one, (*path, name))


def _line(help: str | None) -> str:
    """The first line, made safe for single quotes."""
    return (help or "").strip().split("\n")[0].replace("\\", "\\\\").replace("'", "\\'")


def script(shell: str, group: Any) -> str:
    found = list(commands(group))
    topics = tuple(found[0].subcommands)
    found = [one._replace(values=topics) if one.path == ("help",) else one for one in found]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](found)


def _cases(found: list[Command]) -> Iterator[str]:
    """For bash and zsh: which words may come after which command."""
    for one in found:
        words = " ".join([*one.subcommands, *one.values, *one.options])
        yield f'    "{" ".join(one.path)}") words="{words}" ;;'


def _walk(found: list[Command]) -> str:
    """The commands that words on the line may be, as a shell pattern: `train|checkpoint|checkpoint list`."""
    return "|".join(f'"{" ".join(one.path)}"' for one in found if one.path)


def _bash(found: list[Command]) -> str:
    return f"""# clipctl completion for bash: eval "$(clipctl completion bash)"
_clipctl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" path="" word words=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "${{path:+$path }}$word" in {_walk(found)}) path="${{path:+$path }}$word" ;; esac
  done
  case "$path" in
{chr(10).join(_cases(found))}
  esac
  if [[ "$current" != -* && -n "$path" ]]; then words="$words $({RUNS})"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _clipctl clipctl
"""


def _zsh(found: list[Command]) -> str:
    return f"""#compdef clipctl
# clipctl completion for zsh: eval "$(clipctl completion zsh)"
_clipctl() {{
  local command="" word words_line=""
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "${{command:+$command }}$word" in {_walk(found)}) command="${{command:+$command }}$word" ;; esac
  done
  case "$command" in
{chr(10).join(line.replace("words=", "words_line=") for line in _cases(found))}
  esac
  compadd -- ${{=words_line}}
  if [[ -n "$command" ]]; then compadd -- $({RUNS}); _files; fi
}}
compdef _clipctl clipctl
"""


def _fish(found: list[Command]) -> str:
    lines = ["# clipctl completion for fish: clipctl completion fish | source"]
    for one in found:
        seen = " ".join(one.path)
        condition = f"__fish_seen_subcommand_from {one.path[-1]}" if seen else "__fish_use_subcommand"
        for name, help in one.subcommands.items():
            others = f"; and not __fish_seen_subcommand_from {' '.join(one.subcommands)}" if seen else ""
            lines.append(f"complete -c clipctl -f -n '{condition}{others}' -a {name} -d '{help}'")
        lines += [
            f"complete -c clipctl -n '{condition}' -l {name.removeprefix('--')} -d '{help}'"
            for name, help in one.options.items()
        ]
        if one.values:
            lines.append(f"complete -c clipctl -f -n '{condition}' -a '{' '.join(one.values)}'")
        elif seen and not one.subcommands:
            lines.append(f"complete -c clipctl -n '{condition}' -a '{FISH_RUNS}'")
    return "\n".join(lines) + "\n"
