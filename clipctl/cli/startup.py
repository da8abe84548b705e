"""Tricks that make commands start fast."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from clipctl.cli.usage import Helpful


class _Light(Helpful):
    """Typer imports pydantic, a third of the time that a command takes to start, to convert every value, given or not.
    Here values that need no conversion are taken as they are."""

    params: list[Any]

    def get_help_option(self, ctx: Any) -> Any:
        return already_false(super().get_help_option(ctx))  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for param in self.params:
            if not param.required and getattr(param, "callback", None) is None:
                param.process_value = _light(param, param.process_value)
        return super().parse_args(ctx, args)


class LightCommand(_Light, TyperCommand):
    pass


class LightGroup(_Light, TyperGroup):
    pass


class SpreadCommand(LightCommand):
    """Takes several values after one option, as people type them: `--sizes 1e6 1e7` is `--sizes 1e6 --sizes 1e7`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread: list[str] = []
        current = None
        for argument in args:
            if argument.startswith("-") and not argument[1:2].isdigit():
                current = argument if argument in repeatable else None
                spread.append(argument)
            elif current and spread[-1] != current:
                spread += [current, argument]
            else:
                spread.append(argument)
        return super().parse_args(ctx, spread)


def already_false(option: Any) -> Any:
    """--help, absent, is None, which would be converted to a bool; False is one already."""
    if option is not None:
        option.default = False
    return option


def _light(param: Any, convert: Any) -> Any:
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)

    def process(ctx: Any, value: Any) -> Any:
        is_ready = value is None or (isinstance(annotation, type) and type(value) is annotation)
        return value if is_ready else convert(ctx, value)

    return process
