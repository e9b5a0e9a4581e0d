"""The control channel: one operation that spreads any rank's error to all.

- What an exchange promises: `Exchange` and `Channel` in `channel.py`.
- Another timeout for a silent rank: `heartbeat_timeout_s` in `dist_ckpt.settings`; for a rank that
  never came: `join_timeout_s`. `failure_detector.py` and `missing_ranks` in `exchange_state.py`
  apply them.
- The order of messages in the store: `Coordinator` and `Participant` in `store_channel.py`.
"""
