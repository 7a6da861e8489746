"""A config becomes a program, and a program becomes a run."""
