"""What the documents that `--json` prints look like, as JSON Schemas: `dist-ckpt schema NAME`.

No object has keys beyond those that are named here, but for those that users name. A document's
`schema` is `dist-ckpt.<name>/<version>`; the version grows when a key changes its meaning or goes.
"""

from __future__ import annotations

from collections.abc import Mapping

Schema = Mapping[str, object]

_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_BOOL: Schema = {"type": "boolean"}
# JSON has no nan and no infinities: these are texts.
_NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
_ANY: Schema = {}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _by_name(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _record(**keys: Schema) -> Schema:
    return {
        "type": "object",
        "properties": keys,
        "required": [*keys],
        "additionalProperties": False,
    }


_LISTED = _record(
    name=_TEXT,
    path=_TEXT,
    state={"enum": ["committed", "open", "abandoned", "damaged", "incompatible"]},
    step=_or_null(_INT),
    nbytes=_or_null(_INT),
    world_size=_or_null(_INT),
    num_tensors=_or_null(_INT),
    saved_at=_or_null({"type": "number"}),
    metadata=_or_null(_by_name(_ANY)),
    problem=_or_null(_TEXT),
    attempt=_or_null(_TEXT),
    save=_or_null(_TEXT),
    metrics=_by_name(_NUMBER),
    tags=_list(_TEXT),
    pin=_or_null(_TEXT),
    holds=_list(_TEXT),
    guards=_list(_TEXT),
    is_verified=_BOOL,
    is_left_behind=_BOOL,
    is_being_replaced=_BOOL,
)

_VERIFIED: Mapping[str, Schema] = {
    "path": _TEXT,
    "level": {"enum": ["full", "quick"]},
    "ok": _BOOL,
    "num_files": _INT,
    "nbytes_checked": _INT,
    "problems": _list(
        _record(
            file=_TEXT,
            rank=_or_null(_INT),
            tensor=_or_null(_TEXT),
            rows=_or_null(_list(_INT)),
            what=_TEXT,
        )
    ),
    "notes": _list(_TEXT),
}

_PAIR = _record(a=_TEXT, b=_TEXT)

_RUN = _record(
    name=_TEXT,
    path=_TEXT,
    num_checkpoints=_INT,
    newest=_or_null(_TEXT),
    step=_or_null(_INT),
    kind=_or_null(_TEXT),
    num_parameters=_or_null(_INT),
    num_trainable=_or_null(_INT),
    config=_ANY,
    best=_or_null(_NUMBER),
    best_step=_or_null(_INT),
    best_path=_or_null(_TEXT),
    metrics=_by_name(_NUMBER),
    problems=_list(_TEXT),
)

# By name: the keys of the document besides `schema`.
_KEYS: Mapping[str, Mapping[str, Schema]] = {
    "ls": {"path": _TEXT, "checkpoints": _list(_LISTED)},
    "show": {
        **dict.fromkeys(("path", "attempt"), _TEXT),
        **{name: _or_null(_INT) for name in ("step", "num_parameters", "num_trainable")},
        "kind": _or_null(_TEXT),
        "config": _ANY,
        "saved_at": {"type": "number"},
        "saved_by": _by_name(_TEXT),
        **dict.fromkeys(
            (*("world_size", "nbytes", "num_tensors", "num_aliases", "num_values"), "num_files"),
            _INT,
        ),
        **{
            name: _by_name(_INT)
            for name in ("mesh", "attached", "nbytes_by_component", "nbytes_by_dtype", "per_rank")
        },
        "metadata": _by_name(_ANY),
    },
    "tree": {
        "path": _TEXT,
        "depth": _INT,
        "nodes": _list(_record(name=_TEXT, nbytes=_INT, tensor=_or_null(_TEXT))),
    },
    "tensors": {
        "path": _TEXT,
        "tensors": _list(
            _record(
                name=_TEXT,
                dtype=_TEXT,
                shape=_list(_INT),
                nbytes=_INT,
                component=_TEXT,
                num_shards=_INT,
                alias_of=_or_null(_TEXT),
            )
        ),
    },
    "stats": {
        "path": _TEXT,
        "ok": _BOOL,
        "tensors": _list(
            _record(
                name=_TEXT,
                dtype=_TEXT,
                shape=_list(_INT),
                numel=_INT,
                min=_or_null(_NUMBER),
                max=_or_null(_NUMBER),
                mean=_or_null(_NUMBER),
                rms=_or_null(_NUMBER),
                zeros=_or_null(_INT),
                nan=_or_null(_INT),
                inf=_or_null(_INT),
                alias_of=_or_null(_TEXT),
            )
        ),
    },
    "layout": {
        "path": _TEXT,
        "nbytes_by_rank": _list(_INT),
        "imbalance": {"type": "number"},
        "files": _list(
            _record(
                name=_TEXT,
                rank=_INT,
                component=_TEXT,
                nbytes=_INT,
                num_shards=_INT,
                shards=_list(
                    {
                        "anyOf": [
                            _record(
                                tensor=_TEXT, nbytes=_INT, offset=_list(_INT), shape=_list(_INT)
                            ),
                            _record(tensor=_TEXT, nbytes=_INT, start=_INT, stop=_INT),
                        ]
                    }
                ),
            )
        ),
    },
    "verify": _VERIFIED,
    "verify-all": {
        "path": _TEXT,
        "ok": _BOOL,
        "checkpoints": _list(_record(**_VERIFIED)),
        "not_checked": _list(_record(path=_TEXT, why=_TEXT)),
    },
    "compare": {
        "metric": _or_null(_TEXT),
        "runs": _list(_RUN),
        "differing": _by_name(_by_name(_TEXT)),
    },
    "diff": {
        "same": _BOOL,
        "a": _TEXT,
        "b": _TEXT,
        "config": _by_name(_PAIR),
        "removed": _list(_TEXT),
        "added": _list(_TEXT),
        "changed": _by_name(_PAIR),
        "objects": _or_null(_by_name(_PAIR)),
        "values": _or_null(
            _list(
                _record(
                    name=_TEXT,
                    num_differing=_INT,
                    numel=_INT,
                    max_difference=_or_null({"type": "number"}),
                )
            )
        ),
    },
    "plan": {
        "path": _TEXT,
        "folder": _TEXT,
        "world_size": _INT,
        "nbytes": _INT,
        "nbytes_rank": _INT,
        "num_files": _INT,
        "num_saves": _INT,
        "num_kept": _INT,
        "num_at_once": _INT,
        "nbytes_free": _INT,
        "nbytes_peak": _INT,
        "rate": _or_null({"type": "number"}),
        "save_s": _or_null({"type": "number"}),
        "fits": _BOOL,
    },
    "prune": {
        "root": _TEXT,
        "dry_run": _BOOL,
        "checkpoints": _list(
            _record(name=_TEXT, path=_TEXT, step=_or_null(_INT), kept_by=_list(_TEXT))
        ),
    },
    "gc": {"path": _TEXT, "dry_run": _BOOL, "removed": _list(_TEXT)},
}

NAMES = tuple(_KEYS)


def schema_of(name: str) -> dict[str, object]:
    """Return the JSON Schema of the document that is called `dist-ckpt.<name>/1`."""
    own: Schema = {"const": f"dist-ckpt.{name}/1"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dist-ckpt.{name}/1",
        **_record(schema=own, **_KEYS[name]),
    }
