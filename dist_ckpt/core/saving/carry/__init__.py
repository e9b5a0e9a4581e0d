"""What a save carries over from a checkpoint that was loaded in part."""
