"""What `--json` prints, as JSON Schemas."""
