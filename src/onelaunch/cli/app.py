"""The typer application around `commands`: exit codes, and one line per mistake."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from onelaunch.cli import commands
from onelaunch.cli.remedies import in_flags
from onelaunch.errors import DivergedError, OnelaunchError, reason_of
from onelaunch.version import VERSION

COMMANDS = (
    commands.train,
    commands.sweep,
    commands.predict,
    commands.evaluate,
    commands.export,
    commands.compare,
    commands.bench,
    commands.report,
    commands.explain,
    commands.examples,
    commands.info,
)
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer's own class, or click's in older versions


def run() -> None:
    """Run the command that the arguments of this process name, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # µ and × on a terminal that has only ASCII
    try:
        code = make_app()(prog_name="onelaunch", standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        sys.exit(_show_usage_error(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # Standard output is the one file without a name.
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
            raise
        sys.stdout = None  # otherwise Python tries to flush it again at exit
        sys.exit(1 if error.errno == errno.EPIPE else f"error: standard output cannot be written: {reason_of(error)}")
    sys.exit(code or 0)


def make_app() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
    )  # fmt: skip
    for command in COMMANDS:
        app.command()(_with_exit_codes(command))
    app.callback()(_options)
    return app


def _show_usage_error(error: Any) -> int:
    """Print a mistake on the command line as one line, or the help where there is no command; returns the exit code."""
    from pydantic import ValidationError

    message = error.format_message()
    if isinstance(error.__cause__, ValidationError):  # typer's message does not name the value
        given = error.__cause__.errors()[0]["input"]
        message = message.replace("Invalid value", f"Invalid value {given!r:.80}", 1)
    if getattr(error, "option_name", None) and error.ctx is not None:  # an unknown flag
        from onelaunch.cli.config import known_as

        flags = {flag.removeprefix("--").replace("-", "_"): flag for p in error.ctx.command.params for flag in p.opts}
        here = known_as(error.option_name.removeprefix("--").replace("-", "_"), flags)
        message = f"No such option: {error.option_name}; did you mean {flags[here]}?" if here else message
    if "\n" in message or error.ctx is None:
        error.show()
    else:
        typer.echo(f"error: {message.rstrip('.')} (see {error.ctx.command_path} --help)", err=True)
    return int(error.exit_code)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"onelaunch {VERSION}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fuses neural networks: one op, one model, one whole training run in one launch."""


def _with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    flags = [
        parameter.name
        for parameter in inspect.signature(command).parameters.values()
        if any(isinstance(entry, OptionInfo) for entry in getattr(parameter.annotation, "__metadata__", ()))
    ]

    @functools.wraps(command)
    def guarded(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except OnelaunchError as error:
            typer.echo(f"error: {in_flags(str(error), flags)}", err=True)
            raise typer.Exit(1 if isinstance(error, DivergedError) else 2) from error
        except KeyboardInterrupt as interrupt:
            # A command that has something to say about what it keeps says it and raises KeyboardInterrupt with an argument.
            if not interrupt.args and os.environ.get("RANK", "0") == "0":
                typer.echo("stopped  interrupted", err=True)
            raise typer.Exit(130) from None

    return guarded
