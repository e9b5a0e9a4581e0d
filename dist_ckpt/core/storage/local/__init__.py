"""Local and mounted file systems: POSIX calls and their pitfalls.

- The remedy in the error of a system call: `_REMEDIES` in `local_storage.py`.
- A file system without exclusive renames: `rename_exclusively` in `local_storage.py`.
- When a read or write bypasses the page cache: `direct_io.py`.
"""
