"""Rows of several arrays in turns, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax.system import rows


def test_arrays_take_turns():
  a, b = jnp.array([0, 1, 2, 3]), jnp.array([10, 11, 12, 13, 14, 15])
  joined = rows.interleave([a, b])
  np.testing.assert_array_equal(joined, [0, 1, 10, 11, 12, 2, 3, 13, 14, 15])


@pytest.mark.parametrize(
  'lengths', [(5,), (4, 4), (8, 56, 56), (3, 7)], ids=str
)
def test_separate_undoes_interleave(lengths):
  keys = jax.random.split(jax.random.key(0), len(lengths))
  arrays = [
    jax.random.normal(key, (n, 2, 3))
    for key, n in zip(keys, lengths, strict=True)
  ]
  joined = rows.interleave(arrays)
  assert joined.shape == (sum(lengths), 2, 3)
  for array, again in zip(arrays, rows.separate(joined, lengths), strict=True):
    np.testing.assert_array_equal(array, again)


@pytest.mark.parametrize('devices', [2, 4, 8])
def test_a_share_of_each_array_is_a_share_of_all(devices):
  """What one device has of 8 and 24 rows is what it has of all 32."""
  a, b = jnp.arange(8), jnp.arange(24) + 100
  shares = [x.reshape(devices, -1) for x in (a, b, rows.interleave([a, b]))]
  for one, other, both in zip(*shares, strict=True):
    assert set(both.tolist()) == set(one.tolist()) | set(other.tolist())
