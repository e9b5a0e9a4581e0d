"""The folder of a run: its checkpoints by step, annotations, requests and retention.

It needs no ranks and no torch. `retention_policy.py` defines the policy, as a plain value and as
text. `prune.py` applies it. `run.py` is the public class for all of this.
"""
