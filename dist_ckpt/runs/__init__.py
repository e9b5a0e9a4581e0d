"""The folder of a run: its checkpoints by step, annotations, leases, requests. No ranks or torch.

`retention_policy.py` defines the policy, as a plain value and as text. `prune.py` applies it.
"""
