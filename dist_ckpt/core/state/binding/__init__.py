"""The loading side of a state: which live memory each saved name goes to."""
