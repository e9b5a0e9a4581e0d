"""The meaning of the bytes on disk: index, shard files, objects files, and their names.

`docs/format.md` is the specification. The index as values is in `index/index.py`, as bytes in
`index/index_json.py`. `shard_file.py` has the headers of shard files, `run_records.py` the records
next to checkpoints. A new type of plain data needs a code and a cost in `objects/plain_types.py`,
and rows in both tables of `objects/plain_codec.py`.
"""
