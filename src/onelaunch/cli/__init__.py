"""The command line: parses and prints. Bad input ends with exit code 2, Ctrl-C with 130, a failed run with 1."""

from __future__ import annotations

import errno
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from onelaunch.errors import DivergedError, OnelaunchError, reason_of
from onelaunch.version import VERSION

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer's own, or click's in older ones


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # µ and × on a terminal that has only ASCII
    try:
        code = _app()(prog_name="onelaunch", standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        sys.exit(_tell_usage(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:  # standard output has no name
            raise
        sys.stdout = None  # or Python tries again as it ends
        sys.exit(1 if error.errno == errno.EPIPE else f"error: standard output cannot be written: {reason_of(error)}")
    sys.exit(code or 0)


def _tell_usage(error: Any) -> int:
    """A mistake on the command line in one line; no command at all is answered with the help."""
    said = error.format_message()
    if isinstance(error.__cause__, ValidationError):  # typer's, which does not name what was passed
        given = error.__cause__.errors()[0]["input"]
        said = said.replace("Invalid value", f"Invalid value {given!r:.80}", 1)
    if "\n" in said or error.ctx is None:
        error.show()
    else:
        typer.echo(f"error: {said.rstrip('.')} (see {error.ctx.command_path} --help)", err=True)
    return int(error.exit_code)


def _app() -> typer.Typer:
    from onelaunch.cli.bench import bench
    from onelaunch.cli.compare import compare
    from onelaunch.cli.explain import explain
    from onelaunch.cli.info import info
    from onelaunch.cli.report import report
    from onelaunch.cli.train import train

    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    for command in (train, compare, bench, report, explain, info):
        app.command()(_with_exit_codes(command))
    app.callback()(_options)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onelaunch {VERSION}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fuses neural networks: one op, one model, one whole training run in one launch."""


def _with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def guarded(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except OnelaunchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, DivergedError) else 2) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    # Typer reads the annotations; as strings they would be looked up here, where their names are not known.
    signature = inspect.signature(command, eval_str=True)
    guarded.__signature__ = signature  # type: ignore[attr-defined]
    guarded.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return guarded
