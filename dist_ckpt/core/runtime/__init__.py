"""What Python and torch lack: threads that nobody waits for, lock files, buffers, typed messages.

`threads.py` runs calls that may hang; `lock_files.py` tells who is alive; `forks.py` is about what
forked children let go of; `gc_pause.py` keeps the collector away for a while; `typed_msgpack.py` is
what ranks and processes tell each other; `torch_private.py` has every private name of torch that is
used, but for those of FSDP1, which are in `state/fsdp1/private_names.py`; `state/rng.py` reads and
sets the random generators.
"""
