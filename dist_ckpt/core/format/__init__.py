"""What the bytes on disk mean: index, shard files, objects files, and their names.

`docs/format.md` specifies it. The index is `format/index/index.py` as values and
`format/index/index_json.py` as bytes, of which `format/index/catalog_json.py` does what is stored
and by whom; `format/shards/shard_file.py` does the headers of shard files, `dtypes.py` is the table
of dtypes, and `run_records.py` does what lies beside checkpoints. Plain data in objects files: a
type has a code in `format/objects/plain_types.py`, where what it costs stands too, a row in the
tables of `format/objects/plain_encoder.py` and of `format/objects/plain_decoder.py`, and for
torch's types one in `state/tensors/plain_torch.py`.
"""
