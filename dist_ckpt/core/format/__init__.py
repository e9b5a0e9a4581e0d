"""What the bytes on disk mean: index, shard files, objects files, and their names.

`docs/format.md` specifies it. The index is `format/index/index.py` as values and
`format/index/index_json.py` as bytes; its catalog, which lists what is stored and by which rank, is
`format/index/catalog_json.py`. The headers of shard files are `format/shard_file.py`, the table of
dtypes is `dtypes.py`, and the records beside checkpoints are `run_records.py`. Plain data in
objects files: a type has a code and a cost in `format/objects/plain_types.py`, a row in the two
tables of `format/objects/plain_codec.py`, and for types of torch one in
`state/tensors/plain_torch.py`.
"""
