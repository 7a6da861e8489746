"""A page to label images in: `python -m flatmatch_jax.label DIR`."""
