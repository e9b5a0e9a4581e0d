"""The save planner: inventories of all ranks -> one plan."""
