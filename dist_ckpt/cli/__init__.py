"""`dist-ckpt`: look at checkpoints, check them, rewrite and remove them.

One file a group of commands (`reading.py`, `changing.py`); each parses, calls and prints. A new
command is added to the group here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from dist_ckpt import __version__
from dist_ckpt.cli import changing, output, reading


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dist-ckpt")
def cli() -> None:
    """Look at checkpoints, check them, rewrite and remove them.

    \b
    Exit codes: 0 fine, 1 a finding (damage), 2 usage, 3 not found or not committed,
    4 incompatible, 5 input/output or space, 6 refused without --yes.
    """  # noqa: D301 - click knows the backspace


for _command in (
    reading.ls,
    reading.show,
    reading.tree,
    reading.verify,
    changing.reshard,
    changing.rm,
    changing.gc,
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        with output.errors_as_exit_codes():
            code = cli.main(args=arguments, prog_name="dist-ckpt", standalone_mode=False)
    except click.exceptions.Exit as wish:
        code = wish.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = output.INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough; python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = output.FINE
    sys.exit(code or output.FINE)
