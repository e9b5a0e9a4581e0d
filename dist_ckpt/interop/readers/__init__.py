"""What readers of other systems' files share: a virtual checkpoint over them, and pickles.

- How the files are presented as a checkpoint, without a copy: `virtual_checkpoint.py`.
- How nested state gets names, what is excluded, what cannot be stored: `nested_state.py`.
- A name that a pickle of torch or numpy may have: `TORCH_NAMES` of `torch_pickles.py`.
- An opcode of pickle: `restricted_pickle.py`. It never looks up a name outside its table.
"""
