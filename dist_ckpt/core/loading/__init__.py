"""`dc.load`: open, check, read, place; `dc.build`.

`load_options.py` has the options; `AsyncSaver.restore` has some of them too, and those that all
ranks must share are compared in `load_messages.py`. `load.py` has the steps, `load_messages.py` the
exchanges between them. `loading/read_once/read_once.py` and its two neighbours let one rank read
what several want. Which memory is filled says `dist_ckpt.core.state.binding`, how blocks are read
`dist_ckpt.core.shard_io`.
"""
