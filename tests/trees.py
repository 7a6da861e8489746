"""Trees of arrays that must be the same."""

import jax
import numpy as np


def assert_close(a, b):
  raw = lambda tree: jax.tree.map(
    lambda x: np.asarray(
      jax.random.key_data(x)
      if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
    raw(a),
    raw(b),
  )


def assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y, strict=True)
