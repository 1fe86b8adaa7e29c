"""The command line: parses and prints. Bad input ends with exit code 2, Ctrl-C with 130, a failed run with 1.

Until a command is called nothing imports torch, so that `--help` and mistakes in the arguments are answered at once.
"""

from onelaunch.cli.interrupts import exit_on_interrupt, raise_on_interrupt


def main() -> None:
    """Run the command that the arguments of this process name, and exit with its code."""
    exit_on_interrupt()
    try:
        from onelaunch.cli.app import run

        run()
    finally:
        raise_on_interrupt()
