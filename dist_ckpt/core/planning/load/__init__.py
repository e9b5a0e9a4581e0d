"""The load planner: matches stored cells and requested cells."""
