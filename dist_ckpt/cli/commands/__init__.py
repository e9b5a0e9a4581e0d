"""The commands, a file each: parse, call, print.

A new command is a file with a function of its name. Shared options: `cli/shared_options.py`.
"""
