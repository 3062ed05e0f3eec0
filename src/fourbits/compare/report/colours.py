"""One colour per recipe, everywhere in a report, in a light and a dark shade."""

import re
from collections.abc import Mapping, Sequence

# Distinct in hue and in lightness, also with the common kinds of colour blindness; each legible as text.
SHADES: dict[str, tuple[str, str]] = {
    "bf16": ("#55585c", "#c4c7cb"),
    "fp8": ("#2667b0", "#7fb4f0"),
    "mxfp4": ("#a85c10", "#e5a35b"),
    "nvfp4": ("#12784f", "#52c993"),
    "nvfp4-naive": ("#b02a63", "#f08bb2"),
    "mxfp8": ("#6449a8", "#b6a4ee"),
}
SPARE = [("#0b7a86", "#58c7d3"), ("#75711a", "#c9c35c"), ("#9a3a28", "#ef8d79"), ("#7a3f8f", "#d79be8")]


def shades(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Light and dark shade of each name; names that are not in SHADES take the spare ones in turn."""
    others = [name for name in names if name not in SHADES]
    spare = {name: SPARE[at % len(SPARE)] for at, name in enumerate(others)}
    return {name: SHADES.get(name) or spare[name] for name in names}


def variables(names: Sequence[str]) -> dict[str, str]:
    """The CSS variable that holds the colour of each name, as `var(--name)`."""
    return {name: f"var(--series-{at})" for at, name in enumerate(names)}


def light_values(names: Sequence[str]) -> dict[str, str]:
    """The values of all CSS variables of colours on a light page, for a drawing outside of one."""
    series = {f"--series-{at}": pair[0] for at, pair in enumerate(shades(names).values())}
    return {"--ink": "#1d1f21", "--muted": "#62666b", "--rule": "#dcd9d1", "--paper": "#fdfcf9"} | series


def palette(names: Sequence[str]) -> str:
    """CSS that sets the variables of `variables`, for light, dark and print."""
    pairs = list(shades(names).values())
    light = "".join(f"--series-{at}:{pair[0]};" for at, pair in enumerate(pairs))
    dark = "".join(f"--series-{at}:{pair[1]};" for at, pair in enumerate(pairs))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def colour_of(precision: str, colours: Mapping[str, str]) -> str:
    """The colour of a format; Fprop's if the three GEMMs differ; grey for a format without a colour."""
    return colours.get(re.split("[/x]", precision)[0]) or colours.get(precision) or "var(--muted)"
