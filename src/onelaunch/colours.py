"""The colours of every page and figure, for light and for dark backgrounds, and which names have a colour of their own.

Words have a contrast of at least 4.5 against their background, shapes of at least 3. Any two of the series colours differ by
30 or more in CIELAB.
"""

from __future__ import annotations

_LIGHT_SERIES = ("#0b57d0", "#c75b00", "#1a7f4b", "#8636c9", "#d6246e", "#0c8599",
                 "#6e6259", "#957500", "#1d2f5c", "#c1121f", "#5b9310", "#a873d6")  # fmt: skip
_DARK_SERIES = ("#7db1ff", "#ffa04d", "#5fd08c", "#c58cff", "#ff7fae", "#45cfe0",
                "#b8aea2", "#e6c83c", "#4a7bff", "#ff6b57", "#b4e04a", "#f3c6ff")  # fmt: skip
SERIES = len(_LIGHT_SERIES)

LIGHT = {
    "ground": "#ffffff", "panel": "#f6f7f9", "text": "#1b1f24", "soft": "#57606a", "line": "#d0d7de", "link": "#0a58ca",
    "shade": "#1b1f2459", "other": "#7b8794", "good": "#176f3c", "bad": "#b42318", "low": "#c9d3df", "high": "#0b57d0",
    "pick": "#b3450a", **{f"s{number}": colour for number, colour in enumerate(_LIGHT_SERIES)},
}  # fmt: skip
DARK = {
    "ground": "#0f1318", "panel": "#181d24", "text": "#e6eaf0", "soft": "#a3adba", "line": "#38414d", "link": "#8ab8ff",
    "shade": "#e6eaf059", "other": "#8793a1", "good": "#6fd694", "bad": "#ff8a80", "low": "#3a4656", "high": "#7db1ff",
    "pick": "#ffa361", **{f"s{number}": colour for number, colour in enumerate(_DARK_SERIES)},
}  # fmt: skip

# The series colour of a name, in every figure of every page. Other names get what is left.
OWN_COLOUR = {
    "onelaunch": 0, "training": 0, "validation": 1, "torch eager": 1, "onelaunch cpu": 2, "onelaunch resident": 3,
    "torch.compile": 4, "onelaunch graph": 5, "onelaunch eager": 6, "JAX scan": 7,
}  # fmt: skip


def colour_rules(where: str) -> str:
    """CSS variables of the selector `where` for the colours: light or dark as the reader's system is, light in print."""
    return (
        f"{where}{{{_variables(LIGHT)}color-scheme:light dark}}"
        f"@media screen and (prefers-color-scheme:dark){{{where}{{{_variables(DARK)}}}}}"
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())
