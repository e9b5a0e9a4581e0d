"""One process works on whole checkpoints: inspect, rewrite, average, report.

Each tool is also a command: `dist_ckpt/cli/commands/` parses its options and prints its result.

- A tool that only reads checkpoints: a module in `inspect/`.
- A tool that makes one checkpoint of another: a function in `rewrite/` that returns a `WritePlan`.
- A dtype that can be averaged: `SUM_DTYPES` in `average/mean.py`.
- A figure in a report: `report/report_content.py`, its type in `cli/report_results.py`, and the
  template.
"""
