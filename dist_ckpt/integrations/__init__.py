"""Thin adapters to training frameworks. No other package imports them.

Readers of the folders that frameworks wrote are in `interop/frameworks/`.

A framework: its module, with the class for users. What several of them save: `adapter_state.py`.
A tracker of references, such as MLflow: a module that gives a `Tracker` to `references.py`.
Private names of a framework: `NEEDED` in its module, checked before training begins.
"""
