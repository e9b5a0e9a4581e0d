"""The public `Checkpointer` of a run: it saves by a policy, prunes, stops and resumes.

A public method or option: `checkpointer.py`; the check of an option: `checkpointer_options.py`.
A rule for when to save: a function such as `every` in `save_policy.py`.
How ranks agree on a boundary: `barrier_rounds.py`; the save there: `run_session.py`.
A signal: `signals.py`. A request of another process: `rank_requests.py`.
Hooks, metrics and pruning after a save: `maintenance.py`. The restore point: `resume.py`.
"""
