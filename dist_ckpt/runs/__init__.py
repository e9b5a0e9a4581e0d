"""The folder of a run: its checkpoints by step, annotations, requests and retention.

It needs no ranks and no torch. `retention_policy.py` defines the policy as a plain value, and
`policy_text.py` its text form. `prune.py` applies it. `run.py` is the public class for all of this.
"""
