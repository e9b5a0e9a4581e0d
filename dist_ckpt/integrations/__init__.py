"""Thin adapters to training frameworks; a framework is imported with its module.

Nothing else of the library imports them.
"""
