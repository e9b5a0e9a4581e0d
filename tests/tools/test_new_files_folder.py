"""A folder for another system is durable before it has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt.core.storage import open_storage
from dist_ckpt.tools.new_files import new_folder


def test_what_lies_in_a_folder_is_durable_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, path = open_storage(tmp_path / "new")
    calls: list[tuple[str, str]] = []
    sync, rename = storage.sync, storage.rename
    cls = type(storage)

    def synced(_: object, of: str) -> None:
        calls.append(("sync", of))
        sync(of)

    def renamed(_: object, source: str, target: str) -> None:
        calls.append(("rename", source))
        rename(source, target)

    monkeypatch.setattr(cls, "sync", synced)
    monkeypatch.setattr(cls, "rename", renamed)
    with new_folder(storage, path) as there:
        Path(there, "file").write_bytes(b"1")
    assert calls == [("sync", there), ("rename", there), ("sync", str(tmp_path))]
