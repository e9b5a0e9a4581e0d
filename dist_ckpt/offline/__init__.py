"""`dc.open`, `dc.verify`, `dc.reshard`, `dc.Run`, `dc.compare`: without ranks or torch.

How one layout becomes another is in `dist_ckpt.planning.load_planner`; `reshard.py` only applies it
to a whole checkpoint.
"""
