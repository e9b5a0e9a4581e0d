"""Local and mounted file systems: POSIX calls and their pitfalls."""
