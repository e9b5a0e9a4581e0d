"""The load planner: stored cells meet wanted cells."""
