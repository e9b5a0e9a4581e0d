"""What Python and torch lack: daemon threads, lock files, host memory, messages.

- Scratch buffers, copies, shared memory: `host_memory.py`.
- Several calls at the same time, a call that may hang: `threads.py`.
- A clock without the stops of this process, the state of another process: `processes.py`.
- The address of this host, a port that shows that its process lives: `network.py`.
- A private name of torch: `torch_private.py`, whose table lists all of them.
- A check of an argument: `arguments.py`. A public name that is renamed: `public_names.py`.
"""
