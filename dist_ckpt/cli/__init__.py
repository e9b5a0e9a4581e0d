"""`dist-ckpt`: inspect, check, rewrite and remove checkpoints; request a save from a run.

- A new command: a file of its name in `commands/`, with a function of that name.
- An option of several commands, or a completion: `shared_options.py`.
- A table, a progress bar, a confirmation, an exit code: `output.py`.
- A field of `--json`: `results.py`, for reports `report_results.py`, and `tests/cli/schemas.json`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click
from click.shell_completion import add_completion_class

from dist_ckpt import __version__
from dist_ckpt.cli import commands, output
from dist_ckpt.cli.commands.completion import BashWords

# The new names of commands, by their names in 0.1.0.
_NEW_NAMES = {"plan": "estimate"}


@cache
def _modules() -> dict[str, str]:
    """Return the modules in `commands/` by the names of their commands: "import_" by "import"."""
    found = (module.name for module in iter_modules(commands.__path__))
    names = sorted(name for name in found if not name.startswith("_"))
    return {name.rstrip("_").replace("_", "-"): name for name in names}


class _Commands(click.Group):
    """The group of commands. The exit code stays if a reader such as `head` closes stdout early.

    click itself would exit with 1.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands. Called by click."""
        return [*_modules()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command when it is first used. Called by click."""
        if (module := _modules().get(cmd_name)) is None:
            return None
        command = getattr(import_module(f"dist_ckpt.cli.commands.{module}"), module)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. Refuse an old name. Called by click."""
        if args and (new := _NEW_NAMES.get(args[0])) is not None:
            raise click.UsageError(
                f"dist-ckpt {args[0]} is called dist-ckpt {new} since 0.2.0", ctx=ctx
            )
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the arguments. This may print a help text. Called by click."""
        with _ignore_closed_output():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Called by click."""
        with _ignore_closed_output():
            result: object = super().invoke(ctx)
            return result


@contextmanager
def _ignore_closed_output() -> Iterator[None]:
    """Ignore the error if the reader of stdout has closed it."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(output.FINE) from None
    finally:
        # The exit code of the command stays, even if its output is not read.
        try:
            sys.stdout.flush()
        except OSError as error:
            # Otherwise Python flushes stdout again at its end, fails, and exits with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dist-ckpt")
def cli() -> None:
    """Inspect, check, rewrite and remove checkpoints.

    A checkpoint is a path, or a selector in the folder of a run:

    \b
    runs/a/step-00012000     a path
    runs/a@latest            the newest committed checkpoint
    runs/a@12000             the checkpoint of a step
    runs/a@min:val/loss      the lowest value of a metric; also max:
    runs/a@tag:release       the checkpoint with a tag

    \b
    Exit codes:
    0  success
    1  a problem is found, such as damage or a difference
    2  usage error
    3  not found, or not committed
    4  incompatible, or a root that must be upgraded
    5  error of input, output, space or memory; or protected
    6  refused without --yes, or no answer
    """


class _StopError(BaseException):
    """Raised on SIGTERM, such as from a scheduler. The command removes its unfinished files."""


@contextmanager
def _stopping_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command in the same way as an interrupt."""

    def stop(*_: object) -> None:
        raise _StopError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    # Replace standard streams that a shell or a service has closed.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    add_completion_class(BashWords)
    try:
        with _stopping_on_sigterm(), output.errors_as_exit_codes():
            code = cli.main(args=arguments, prog_name="dist-ckpt", standalone_mode=False)
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = output.INTERRUPTED
    except _StopError:
        click.echo("stopped by SIGTERM", err=True)
        code = output.STOPPED
    sys.exit(code or output.FINE)
