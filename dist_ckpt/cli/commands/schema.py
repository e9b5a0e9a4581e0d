"""The command `schema`: print the JSON Schema of a document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click

from dist_ckpt.cli.schemas import documents, report_schema
from dist_ckpt.cli.schemas.documents import Keys

# Of each document the keys besides `schema`; of one that has several forms all of them.
_FORMS: Mapping[str, Sequence[Keys]] = {
    **{name: (keys,) for name, keys in documents.KEYS.items()},
    "report": report_schema.FORMS,
}
NAMES = tuple(sorted(_FORMS))


def schema_of(name: str) -> dict[str, object]:
    """Return the JSON Schema of the document `dist-ckpt.<name>/<version>`."""
    title = documents.title_of(name)
    forms = [documents.record(schema={"const": title}, **keys) for keys in _FORMS[name]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **(forms[0] if len(forms) == 1 else {"anyOf": forms}),
    }


@click.command()
@click.argument("name", type=click.Choice(NAMES))
def schema(name: str) -> None:
    """Print the JSON Schema of a document that --json prints: its name is in its `schema`.

    \b
    dist-ckpt schema ls
    """  # noqa: D301 - click knows the backspace
    click.echo(json.dumps(schema_of(name), indent=2))
