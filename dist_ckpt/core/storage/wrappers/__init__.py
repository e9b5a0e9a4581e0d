"""Storages around another storage: they count, limit, pace, or only read."""
