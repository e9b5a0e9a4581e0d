"""The commands about the command line itself: completion, schema."""

from __future__ import annotations

import json

import click
from click.shell_completion import get_completion_class

from dist_ckpt.cli import schemas


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
    found = get_completion_class(shell)
    assert found is not None
    command = ctx.find_root().command
    click.echo(found(command, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE").source())


@click.command()
@click.argument("name", type=click.Choice(schemas.NAMES))
def schema(name: str) -> None:
    """Print the JSON Schema of a document that --json prints: its name is in its `schema`.

    \b
    dist-ckpt schema ls
    """  # noqa: D301 - click knows the backspace
    click.echo(json.dumps(schemas.schema_of(name), indent=2))
