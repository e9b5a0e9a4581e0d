"""`dc.load`: open, check, read, place; `dc.build`.

`options.py` has the options; `AsyncSaver.restore` has some of them too, and those that all ranks
must share are compared in `load_steps.py`. `load.py` has the steps, `load_steps.py` the exchanges
between them. `read_once.py` and its two neighbours let one rank read what several want. Which
memory is filled says `dist_ckpt.binding`, how blocks are read `dist_ckpt.shard_io`.
"""
