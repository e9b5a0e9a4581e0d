"""What Python and torch lack: daemon threads, lock files, buffers, shared memory, messages."""
