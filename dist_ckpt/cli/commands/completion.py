"""The command `completion`: print the script that completes words in a shell."""

from __future__ import annotations

import click
from click.shell_completion import (
    get_completion_class,
)

from dist_ckpt.cli.completion import BashWords


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what has a shell complete commands, options and paths.

    \b
    dist-ckpt completion bash >> ~/.bashrc
    dist-ckpt completion zsh >> ~/.zshrc
    dist-ckpt completion fish > ~/.config/fish/completions/dist-ckpt.fish
    """  # noqa: D301 - click knows the backspace
    shell_class = BashWords if shell == "bash" else get_completion_class(shell)
    assert shell_class is not None
    command = ctx.find_root().command
    click.echo(shell_class(command, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE").source())
