"""Modules that convert their own state while it is loaded.

- Which modules convert: `conversion_decision.py`.
- What they get, what is missing then, and which state of optimizers does not follow:
  `conversion_plan.py`.
"""
