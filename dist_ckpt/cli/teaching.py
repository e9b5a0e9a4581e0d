"""The commands about the command line itself: completion, schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import get_completion_class

from dist_ckpt.cli import report_schema, schemas
from dist_ckpt.cli.schemas import Keys

# Of each document the keys besides `schema`; of one that has several forms all of them.
_FORMS: Mapping[str, Sequence[Keys]] = {
    **{name: (keys,) for name, keys in schemas.KEYS.items()},
    "report": report_schema.FORMS,
}
NAMES = tuple(sorted(_FORMS))


def schema_of(name: str) -> dict[str, object]:
    """Return the JSON Schema of the document that is called `dist-ckpt.<name>/1`."""
    title = f"dist-ckpt.{name}/1"
    forms = [schemas.record(schema={"const": title}, **keys) for keys in _FORMS[name]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **(forms[0] if len(forms) == 1 else {"anyOf": forms}),
    }


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
@click.argument("name", type=click.Choice(NAMES))
def schema(name: str) -> None:
    """Print the JSON Schema of a document that --json prints: its name is in its `schema`.

    \b
    dist-ckpt schema ls
    """  # noqa: D301 - click knows the backspace
    click.echo(json.dumps(schema_of(name), indent=2))
