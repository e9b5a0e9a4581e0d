"""What background saves leave in shared memory, and how it is found and read again."""
