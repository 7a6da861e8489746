"""Refuses what cannot fit into memory before it is tried.

Bounds from below: what passes may still be too much.
"""

import math
import os

import jax

from flatmatch_jax.types import UserError


def host_bytes() -> int:
  """The machine's physical memory."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def device_bytes() -> int:
  """The memory of all devices together; CPU devices share their machine's."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit'] * jax.device_count()
  return host_bytes() * jax.process_count()


def check(config, state, image_shape, views: tuple[str, ...]) -> None:
  """Raises UserError where state and images of a step exceed all devices.

  The train state is given as shapes; `views` are as the method names them.
  """
  arrays = sum(
    math.prod(x.shape) * x.dtype.itemsize
    for x in jax.tree.leaves(state)
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  )
  labeled = sum(name.startswith('labeled_') for name in views)
  rows = max(
    (1 + labeled) * config.batch_size
    + (len(views) - labeled) * config.unlabeled_batch_size,
    config.eval_batch_size,
  )
  images = 4 * rows * math.prod(image_shape)
  if arrays + images > (there := device_bytes()):
    raise UserError(
      f'The state of {config.model} takes {gib(arrays)} and the images of a '
      f'batch {gib(images)}, more than the {gib(there)} of memory; take a '
      'smaller config.model, config.batch_size, config.unlabeled_batch_size '
      'or config.eval_batch_size.'
    )


def gib(number: float) -> str:
  return f'{number / 2**30:,.1f} GiB'
