"""Records in a run's root: annotations, protections and leases of checkpoints; incarnations."""
