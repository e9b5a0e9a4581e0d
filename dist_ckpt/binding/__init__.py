"""Which live memory each saved name goes to, and whether it fits."""
