"""Images in batches of one size, spread over all devices, to classify."""

from collections.abc import Callable, Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.system import sharding


def make_batches(
  batch_size: int, mesh: jax.sharding.Mesh
) -> Callable[[Any], Iterator[jax.Array]]:
  """Returns `batches(images)`, which yields [batch_size, H, W, C] in order.

  Images are on all devices, arrays of the host, or decoded as they are asked
  for. The last batch is filled up. Every process has all images, but decodes
  and gives only its own rows. `batch_size` is a multiple of the devices.
  """
  over_batch = sharding.over_batch(mesh)

  @functools.partial(jax.jit, out_shardings=over_batch)
  def rows_from(images, start):
    index = start + jnp.arange(batch_size)
    return images[jnp.minimum(index, len(images) - 1)]

  def batches(images):
    starts = range(0, len(images), batch_size)
    if hasattr(images, 'sharding'):  # On all devices already.
      yield from (rows_from(images, start) for start in starts)
      return
    local = sharding.local_rows(over_batch, batch_size)
    if len(local) < batch_size:
      mine = np.add.outer(starts, local).ravel()
      images = images[mine[mine < len(images)]]
    for start in range(0, len(starts) * len(local), len(local)):
      batch = _filled(images[start : start + len(local)], len(local))
      yield sharding.from_local_rows(batch, over_batch)

  return batches


def _filled(batch, size):
  missing = ((0, size - len(batch)), (0, 0), (0, 0), (0, 0))
  return np.pad(batch, missing) if len(batch) < size else batch
