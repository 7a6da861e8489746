"""Augmentations as pure functions of a key, on uint8 batches [B, H, W, C].

Weak is a random flip and a shifted crop; strong is RandAugment and Cutout, and
then weak, in the order of TorchSSL. Every image draws its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.data import randaugment
from flatmatch_jax.types import UserError


def weak(key, images, pad, flip):
  """Flips half of the images if `flip`, pads by reflection, crops at random.

  `pad` is in pixels on each side, fewer than the height and the width.
  """
  pixels = _weak(key, randaugment.pack(images), pad, flip)
  return randaugment.unpack(pixels, images.shape[-1])


def _weak(key, pixels, pad, flip):
  size, height, width = pixels.shape
  if not 0 <= pad < min(height, width):
    raise UserError(
      f'Reflection by {pad} of images of {height} x {width}; choose a pad '
      'from 0 to below the smaller side.'
    )
  shift_key, flip_key = jax.random.split(key)
  shift = jax.random.randint(shift_key, (size, 2), -pad, pad + 1) + pad
  rows = jnp.asarray(_reflected(pad, height))[shift[:, 0]]  # [B, H]
  columns = _reflected(pad, width)
  columns = jnp.asarray(np.stack([columns, width - 1 - columns]))
  flipped = jnp.zeros(size, int)
  if flip:
    flipped = jax.random.bernoulli(flip_key, shape=(size, 1))[:, 0].astype(int)
  columns = columns[flipped, shift[:, 1]]  # [B, W]
  # Whole rows and then whole columns, since TPUs are slow at single pixels.
  take = functools.partial(jnp.take_along_axis, mode='promise_in_bounds')
  return take(take(pixels, rows[:, :, None], 1), columns[:, None], 2)


def _reflected(pad, size):
  """What a row is after each shift by -pad to pad; the edge is not repeated."""
  index = np.abs(np.arange(-pad, pad + 1)[:, None] + np.arange(size))
  return np.minimum(index, 2 * (size - 1) - index)


def strong(key, images, pad, flip, groups=1, operations=3):
  """Applies `operations` of RandAugment, Cutout, and then `weak`.

  `groups` is the number of devices that the images are spread over.
  """
  size, *_, channels = images.shape
  keys = jax.random.split(key, 3)
  operation, magnitude = randaugment.draw(keys[0], (operations, size))
  centre, side = draw_cutout(keys[1], size)
  pixels = randaugment.pack(images)
  pixels = randaugment.apply_packed(
    pixels, operation, magnitude, channels, groups
  )
  pixels = _cutout(pixels, centre, side, channels)
  return randaugment.unpack(_weak(keys[2], pixels, pad, flip), channels)


def draw_cutout(key, size):
  """A centre anywhere and a side up to half the width, for `size` images."""
  where, how = jax.random.split(key)
  centre = jax.random.randint(where, (size, 2), 0, 1024)
  return centre, jax.random.randint(how, (size,), 0, 513)


def cutout(images, centre, side):
  """Paints a square; `centre` [B, 2] (y, x) and `side` [B] are in size / 1024.

  As TorchSSL does with ImageDraw: the side is a share of the width, the end is
  painted too, and a square that begins outside is moved in, not clipped.
  """
  channels = images.shape[-1]
  pixels = _cutout(randaugment.pack(images), centre, side, channels)
  return randaugment.unpack(pixels, channels)


def _cutout(pixels, centre, side, channels):
  _, height, width = pixels.shape
  side = (width * side)[:, None]  # In 1/1024 pixels.

  def inside(centre, size):
    start = jnp.maximum(2 * size * centre[:, None] - side, 0) >> 11
    stop = start + (side >> 10)
    at = jnp.arange(size)
    return (side > 0) & (start <= at) & (at <= stop)

  rows, columns = inside(centre[:, 0], height), inside(centre[:, 1], width)
  fill = 125 | 123 << 8 | 114 << 16 if channels == 3 else 123
  return jnp.where(rows[:, :, None] & columns[:, None], fill, pixels)


def normalize(images, mean, std):
  """Scales to [0, 1] and whitens with `mean` and `std` [C]: float32."""
  scaled = images.astype(jnp.float32) / 255
  return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(
    std, jnp.float32
  )


def make_view(pad, flip, mean, std, sharding=None, operations=3):
  """Returns `view(name, key, images)`, normalized.

  It is strong if the name says so, such as 'strong2', or 'medium', and weak
  otherwise. `sharding` is that of the images, `operations` the number of
  RandAugment's in a strong view; a medium one has one.
  """
  groups = 1 if sharding is None else sharding.num_devices

  def view(name, key, images):
    if number := operations_of(name, operations):
      images = strong(key, images, pad, flip, groups, number)
    else:
      images = weak(key, images, pad, flip)
    return normalize(images, mean, std)

  return view


def operations_of(name: str, operations: int) -> int:
  """How many operations of RandAugment a view has; a weak one has none.

  `operations` is the number of a strong view's.
  """
  if name.startswith('strong'):
    return operations
  return 1 if name.startswith('medium') else 0


def of_labeled(view, names, key, images):
  """Views by `names` of the labeled images, which are given for each name."""
  keys = [key, *(jax.random.fold_in(key, i) for i in range(1, len(names)))]
  return {
    name: view(name, key, images[name])
    for name, key in zip(names, keys, strict=True)
  }
