"""Thin adapters to training frameworks; each module imports its framework.

No other package imports them.
"""
