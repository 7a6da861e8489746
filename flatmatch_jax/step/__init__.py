"""The equation of a training step, and its parts."""
