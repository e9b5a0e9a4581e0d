"""What background saves leave in shared memory, and how it is read again."""
