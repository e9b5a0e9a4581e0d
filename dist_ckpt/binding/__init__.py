"""Which live memory each saved name goes to."""
