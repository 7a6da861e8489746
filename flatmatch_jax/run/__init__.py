"""The folder of a run: its files, and what is read and drawn from them."""
