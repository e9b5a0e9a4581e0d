"""What lies in a run's folder: its checkpoints by step, annotations, leases, requests.

Without ranks or torch. `runs/retention/retention_policy.py` is the policy, as a plain value, and
`runs/retention/policy_text.py` is how it is written in configuration files and on the command line;
`runs/retention/prune.py` applies it.
"""
