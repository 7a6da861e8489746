"""Augmentations as pure functions of a key, on uint8 batches [B, H, W, C].

Weak is a random flip and a shifted crop; strong is RandAugment and Cutout, and
then weak, in the order of TorchSSL. Every image draws its own.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.data import randaugment
from flatmatch_jax.types import UserError


def weak(key, images, pad, flip):
  """Flips half of the images, pads by reflection, crops at random.

  Args:
    key: random key.
    images: uint8 [B, H, W, C].
    pad: pixels on each side, fewer than the height and the width.
    flip: whether to flip at all.
  """
  size, height, width, _ = images.shape
  if not 0 <= pad < min(height, width):
    raise UserError(
      f'Reflection by {pad} of images of {height} x {width}; choose a pad '
      'from 0 to below the smaller side.'
    )
  shift_key, flip_key = jax.random.split(key)
  shift = jax.random.randint(shift_key, (size, 2), -pad, pad + 1)
  rows = _reflect(shift[:, :1] + jnp.arange(height), height)  # [B, H]
  columns = _reflect(shift[:, 1:] + jnp.arange(width), width)  # [B, W]
  if flip:
    flipped = jax.random.bernoulli(flip_key, shape=(size, 1))
    columns = jnp.where(flipped, width - 1 - columns, columns)
  take = lambda image, row, column: image.at[row[:, None], column].get(
    mode='promise_in_bounds'
  )
  return jax.vmap(take)(images, rows, columns)


def strong(key, images, pad, flip):
  """Applies RandAugment with three operations, Cutout, and then `weak`."""
  keys = jax.random.split(key, 3)
  images = randaugment.randaugment(keys[0], images)
  images = cutout(images, *draw_cutout(keys[1], len(images)))
  return weak(keys[2], images, pad, flip)


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
  _, height, width, channels = images.shape
  side = (width * side)[:, None]  # In 1/1024 pixels.

  def inside(centre, size):
    start = jnp.maximum(2 * size * centre[:, None] - side, 0) >> 11
    stop = start + (side >> 10)
    at = jnp.arange(size)
    return (side > 0) & (start <= at) & (at <= stop)

  rows, columns = inside(centre[:, 0], height), inside(centre[:, 1], width)
  fill = jnp.uint8((125, 123, 114) if channels == 3 else (123,))
  square = rows[:, :, None, None] & columns[:, None, :, None]
  return jnp.where(square, fill, images)


def normalize(images, mean, std):
  """Scales to [0, 1] and whitens with `mean` and `std` [C]: float32."""
  scaled = images.astype(jnp.float32) / 255
  return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(
    std, jnp.float32
  )


def _reflect(index, size):
  """Folds indices up to `size` - 1 outside back; the edge is not repeated."""
  index = jnp.abs(index)
  return jnp.where(index < size, index, 2 * (size - 1) - index)
