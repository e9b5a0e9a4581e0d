"""The commands, a file each: parse, call, print."""
