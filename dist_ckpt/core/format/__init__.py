"""The meaning of the bytes on disk: index, shard files, objects files, and their names.

`docs/format.md` is the specification.

- A field of the index: `index/index.py`, and its JSON in `index/index_json.py`.
- A field of a shard file's header: `shard_file.py`. A record of a run: `run_records.py`.
- A dtype: `dtypes.py`, which names the other tables.
- Another checksum: `checksums.py`. It needs a new `VERSION` in `strict_json.py`.
- A type of plain data: `objects/`. The name of a file: `filenames.py`.
"""
