"""A number for the bits of each array of a state, computed where it lies."""

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.types import PyTree


def checksums(tree: PyTree) -> dict[str, int]:
  """32 bits per array, by its path; a change of any bit changes them.

  A sum of whole numbers is exact in any order, so it does not depend on how
  arrays are split over devices and processes. Every process has to call this.
  """
  # One array after another: many virtual devices of a CPU that sum at once can
  # wait for each other until XLA aborts. Equal shapes compile once.
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): int(
      _of_host(leaf) if isinstance(leaf, np.ndarray) else _of_leaf(leaf)
    )
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def _of_host(leaf: np.ndarray):
  """The same of an array of the host: to compile would take longer."""
  leaf = np.ascontiguousarray(leaf)
  bits = np.dtype(f'uint{8 * min(leaf.dtype.itemsize, 4)}')
  words = leaf.view(bits).astype(np.uint32).ravel()
  return _mix(words, np.arange(len(words), dtype=np.uint32)).sum(
    dtype=np.uint32
  )


@jax.jit
def _of_leaf(leaf):
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  if leaf.dtype == bool:
    leaf = leaf.astype(jnp.uint8)
  bits = jnp.dtype(f'uint{8 * min(leaf.dtype.itemsize, 4)}')
  words = jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32)
  # Positions without a reshape, which would move what is split over devices.
  position = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size) + index
  return _mix(words, position).sum(dtype=jnp.uint32)


def _mix(words, position):
  # MurmurHash3's last rounds: one to one, and equal words at two places or
  # equal changes of two words do not cancel.
  mixed = words ^ ((position + 1) * np.uint32(0x9E3779B1))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
  return mixed
