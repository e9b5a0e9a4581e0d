"""What lies in a run's folder: its checkpoints by step, facts about them, what is kept and pruned.

Without ranks or torch. `keep.py` is the policy, as a plain value, and `policy_text.py` is how it
is written in configuration files and on the command line; `prune.py` applies it.
"""
