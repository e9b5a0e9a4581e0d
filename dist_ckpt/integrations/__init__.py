"""Thin adapters to training frameworks, one module each; a framework is imported with its module.

Nothing else of the library imports them.
"""
