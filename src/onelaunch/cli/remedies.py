"""Remedies as flags: a message of the library says `pass batch_size=32`, on the command line that is `--batch-size 32`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

VALUE = r"'[^'\\]*'|\"[^\"\\]*\"|\[[^\]\[]*\]|[-+]?[0-9][\w.+-]*\b|True|False|None|(?=[\s,;.:)]|$)"


def in_flags(message: str, flags: Collection[str]) -> str:
    """The message with flags for arguments after its first "pass", where the remedy is.

    flags: the names of the command's flags, as arguments. A value that a flag cannot take, such as a pair, stays as it is.
    """
    problem, remedy_begins, remedy = message.partition("pass ")
    if not flags or not remedy:
        return message
    names = "|".join(sorted(flags, key=len, reverse=True))
    remedy = re.sub(rf"(?<![\w'.-])({names})=({VALUE})", lambda found: _flag(found[1], found[2]), remedy)
    remedy = re.sub(rf"^(another )?({names})(?= as |$)", lambda found: (found[1] or "") + _flag(found[2], ""), remedy)
    words = "|".join(name for name in flags if "_" in name)  # the others are also ordinary words
    if words:
        remedy = re.sub(rf"(?<![\w'.-])({words})(?![\w=.'])", lambda found: _flag(found[1], ""), remedy)
    return problem + remedy_begins + remedy


def _flag(name: str, value: str) -> str:
    """`--lr 0.1`, `--drop-last`, `--no-drop-last`, and `no --clip-norm` for None."""
    flag = f"--{name.replace('_', '-')}"
    if value == "False":
        return f"--no-{flag[2:]}"
    if value == "None":
        return f"no {flag}"
    if value in ("", "True"):
        return flag
    if value[0] == "[":
        value = re.sub(r"[\s\[\]']", "", value)
    elif value[0] in "'\"":
        value = shlex.quote(value[1:-1])
    return f"{flag} {value}"
