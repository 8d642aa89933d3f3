"""The command line: `autodsm list | reproduce | report | data | train | fit | resume | sample | evaluate | export`."""

import io
import sys

import tyro
from rich.console import Console
from rich.text import Text

from .arguments import Command


def plain_console(*, stderr: bool = False) -> Console:
    """Prints text as it is: names of folders and messages may hold brackets and colons, which are no markup."""
    return Console(stderr=stderr, markup=False, emoji=False)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without λ prints ? in its place
            stream.reconfigure(errors="replace")
    command = tyro.cli(Command, prog="autodsm", description="Learn the score of any diffusion.")  # pyright: ignore
    try:
        from . import commands  # here: it loads JAX, which --help has no use for

        commands.carry_out(command, plain_console())
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        message = Text.assemble(("error:", "bold red"), f" {error}")
        plain_console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        plain_console(stderr=True).print(str(stop) or "stopped.", soft_wrap=True)
        sys.exit(130)
