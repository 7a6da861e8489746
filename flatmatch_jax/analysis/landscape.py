"""The loss around a checkpoint, along random directions.

Directions are filter-normalized (Li et al., https://arxiv.org/abs/1712.09913):
each filter of a direction is as long as that of the weights, so that networks
whose weights differ in scale can be compared; biases and the parameters of
normalization do not move.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.models import vit
from flatmatch_jax.system import sharding
from flatmatch_jax.types import PyTree


@jax.jit
def random_direction(rng: jax.Array, params: PyTree) -> PyTree:
  """A random direction with the filter norms of `params`.

  The last axis of a kernel counts its filters, of a dense layer its units.
  """
  leaves, structure = jax.tree.flatten(params)
  keys = jax.tree.unflatten(structure, jax.random.split(rng, len(leaves)))

  def draw(path, key, weights):
    if weights.ndim < 2 or path[0].key in vit.EMBEDDINGS:
      return jnp.zeros_like(weights)
    noise = jax.random.normal(key, weights.shape, weights.dtype)
    return noise * filter_norms(weights) / filter_norms(noise)

  return jax.tree_util.tree_map_with_path(draw, keys, params)


def filter_norms(kernel: jax.Array) -> jax.Array:
  """The length of each filter, kept over all axes but the last."""
  axes = tuple(range(kernel.ndim - 1))
  return jnp.sqrt(jnp.sum(kernel**2, axes, keepdims=True))


@jax.jit
def loss_at(
  loss: Callable, params: PyTree, directions: tuple, shares: jax.Array
) -> jax.Array:
  """The loss at params + Σ shares[i]·directions[i]."""
  for share, direction in zip(shares, directions, strict=True):
    params = jax.tree.map(lambda p, d, s=share: p + s * d, params, direction)
  return loss(params)


def surface(
  loss: Callable,
  params: PyTree,
  directions: tuple,
  at: np.ndarray,
  progress: Callable[[Iterable], Iterable] = iter,
) -> np.ndarray:
  """The loss at all combinations of the shares `at` [n]: n × n, or n for one.

  The axes are in the order of `directions`. Points are computed one after
  another: on a CPU a loop inside XLA runs convolutions on one core, and a
  batch of points, whose convolutions are grouped, took twice the time.
  `progress` wraps the points.
  """
  grid = np.meshgrid(*[at] * len(directions), indexing='ij')
  points = np.stack([axis.ravel() for axis in grid], -1).astype(np.float32)
  found = [
    sharding.settle(loss_at(loss, params, directions, x))
    for x in progress(points)
  ]
  return np.array(jax.device_get(found)).reshape(grid[0].shape)
