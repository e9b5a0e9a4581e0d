"""What an optimizer holds, under its parameters' names."""
