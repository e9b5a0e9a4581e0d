"""`dc.save`: read the state, agree on a plan, write; carry over the rest of a checkpoint.

- A new argument: `SaveOptions` in `save_options.py`; if it must be equal on all ranks, also
  `SaveArguments` in `agreement.py`.
- What a rank reads and writes: `rank_save.py`; attached files: `attachments.py`.
- `carry_over`: the plan in `carry_plan.py`, reads and writes in `carry_over.py`.
- A check of the plan before a save, such as of its bytes: `accept_plan` in `save.py`.
- The claim, the check of the free space, and a hook after a save: `core/commit/transaction.py`.
- Background saves take the same steps in two processes: `dist_ckpt.async_save.trainer`.
"""
