"""What the bytes on disk mean: index, shard files, objects files, and their names.

`docs/format.md` specifies it. The index is `index.py` as values and `index_json.py` as bytes, of
which `catalog_json.py` does what is stored and by whom; `shard_file.py` does the headers of shard
files, `dtypes.py` is the table of dtypes, and `root_records.py` does what lies beside checkpoints.
Plain data in objects files: a type has a code in `plain_types.py`, where what it costs stands too,
a row in the tables of `plain_encoder.py` and of `plain_decoder.py`, and for torch's types one in
`state/plain_torch.py`.
"""
