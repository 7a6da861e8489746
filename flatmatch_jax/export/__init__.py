"""A trained model as a file or a page: `python -m flatmatch_jax.export`."""
