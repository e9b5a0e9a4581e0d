"""What scripts/bench.py runs: contenders, scenarios, raw limits, reports."""
