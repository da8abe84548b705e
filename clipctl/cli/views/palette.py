"""Colours by what they mean, for dark and light terminals, and for those with sixteen colours only.

Rich turns 24-bit colours into the nearest of 256 if the terminal has no more, and into none with NO_COLOR.
"""

from dataclasses import dataclass

Gradient = tuple[str, ...]  # from low to high
SHADES = 24
THEMES = ("auto", "dark", "light", "ansi")


@dataclass(frozen=True)
class Palette:
    name: str
    strong: str  # the figures one looks for
    dim: str
    frame: str
    title: str
    key: str
    good: str
    warn: str
    bad: str
    raw: str  # every single step
    smooth: Gradient  # the loss, from low to high
    found: Gradient  # recall, from low to high
    load: Gradient  # of cores and memory: fine to full
    heat: Gradient  # of gradient norms
    runs: tuple[str, ...]  # up to four beside each other
    phases: tuple[str, ...]  # of a step


def shade(gradient: Gradient, share: float) -> str:
    """The colour at a share of 0–1."""
    return gradient[min(len(gradient) - 1, max(0, int(share * len(gradient))))]


def _blend(*stops: str) -> Gradient:
    """Colours in even steps between some of the form #rrggbb."""
    colours = [tuple(int(stop[place : place + 2], 16) for place in (1, 3, 5)) for stop in stops]
    found = []
    for number in range(SHADES):
        place = number * (len(colours) - 1) / (SHADES - 1)
        before = min(int(place), len(colours) - 2)
        mixed = (
            round(left + (right - left) * (place - before))
            for left, right in zip(colours[before], colours[before + 1], strict=True)
        )
        found.append("#" + "".join(f"{value:02x}" for value in mixed))
    return tuple(found)


DARK = Palette(
    name="dark",
    strong="bold #f4f1de",
    dim="#8a93a6",
    frame="#465066",
    title="bold #b8c4e0",
    key="bold #7dcfff",
    good="#9ece6a",
    warn="#e0af68",
    bad="bold #f7768e",
    raw="#4a5470",
    smooth=_blend("#7dcfff", "#7aa2f7", "#bb9af7", "#f7768e"),
    found=_blend("#565f89", "#bb9af7", "#9ece6a"),
    load=_blend("#73daca", "#9ece6a", "#e0af68", "#f7768e"),
    heat=_blend("#24283b", "#3d59a1", "#bb9af7", "#ff9e64", "#ffe9b0"),
    runs=("#7dcfff", "#ff9e64", "#9ece6a", "#f7768e"),
    phases=("#e0af68", "#73daca", "#7aa2f7", "#bb9af7", "#f7768e"),
)
LIGHT = Palette(
    name="light",
    strong="bold #1a1b26",
    dim="#6b7080",
    frame="#b6bccb",
    title="bold #34548a",
    key="bold #0f5f9e",
    good="#387a1c",
    warn="#8f5e15",
    bad="bold #b3173f",
    raw="#c2c8d6",
    smooth=_blend("#0f6f9e", "#2e5fc4", "#7847bd", "#b3173f"),
    found=_blend("#9aa0b0", "#7847bd", "#387a1c"),
    load=_blend("#118c74", "#387a1c", "#b3701a", "#b3173f"),
    heat=_blend("#eef1f8", "#b9c8ee", "#8f6fce", "#d9622b", "#7a1010"),
    runs=("#0f6f9e", "#c2561a", "#387a1c", "#b3173f"),
    phases=("#b3701a", "#118c74", "#2e5fc4", "#7847bd", "#b3173f"),
)
# The names that every terminal has in its own colours; nothing is brighter or darker than the terminal makes it.
ANSI = Palette(
    name="ansi",
    strong="bold",
    dim="dim",
    frame="dim",
    title="bold",
    key="bold cyan",
    good="green",
    warn="yellow",
    bad="bold red",
    raw="bright_black",
    smooth=("cyan",),
    found=("magenta",),
    load=("green", "green", "yellow", "red"),
    heat=("blue", "cyan", "magenta", "yellow", "red"),
    runs=("cyan", "yellow", "green", "magenta"),
    phases=("yellow", "cyan", "blue", "magenta", "red"),
)


def palette(theme: str, *, is_light: bool = False, colours: str | None = "truecolor") -> Palette:
    """The palette named `theme`; `auto` follows the terminal. `colours`: Rich's name for what the terminal can show."""
    if theme == "ansi" or (theme == "auto" and colours in ("standard", "windows")):
        return ANSI
    return LIGHT if theme == "light" or (theme == "auto" and is_light) else DARK
