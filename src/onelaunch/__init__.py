"""onelaunch: one op, one model, one whole training run in one launch."""

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

from onelaunch.version import VERSION as __version__  # noqa: F401


def _is_command_line() -> bool:
    """Whether this process is `onelaunch …` or `python -m onelaunch …`, which answers `--help` without importing torch."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # Python still looks for the module to run, which may be one of a package that imports this one
        return ("-m", "onelaunch") in pairwise(sys.orig_argv)
    return os.path.splitext(os.path.basename(program))[0] == "onelaunch"


if TYPE_CHECKING or not _is_command_line():
    from onelaunch.public import *  # noqa: F403
    from onelaunch.public import __all__ as __all__

    def __dir__() -> list[str]:
        """The public names, without the modules that importing them loads."""
        return sorted(__all__)
