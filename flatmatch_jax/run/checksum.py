"""One number for the bits of a whole train state, computed where it lies."""

import jax
import jax.numpy as jnp

from flatmatch_jax.types import PyTree


def checksum(tree: PyTree) -> int:
  """32 bits that a change of any bit of any array changes.

  A sum of whole numbers is exact in any order, so it does not depend on how
  arrays are split over devices and processes. Every process has to call this.
  """
  total = 0
  # A function a leaf: many leaves have equal shapes, which compile once. One
  # after the other: many virtual devices of a CPU that sum at once can wait for
  # each other until XLA aborts.
  for leaf in jax.tree.leaves(tree):
    number = int(_of_leaf(leaf))
    total = (total * 0x01000193 + number) % 2**32  # Odd: none is lost.
  return total


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
  # MurmurHash3's last rounds: one to one, and equal words at two places or
  # equal changes of two words do not cancel.
  mixed = words ^ ((position + 1) * jnp.uint32(0x9E3779B1))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  return mixed.sum(dtype=jnp.uint32)
