"""RandAugment on the device, bit for bit what Pillow computes.

https://arxiv.org/abs/1909.13719 with the operations and ranges of TorchSSL.

All is integer arithmetic and magnitudes are whole numbers on a fine grid, so
every device gives the same pixels. Images are not branched on. An operation is
  an affine gather, the identity unless Rotate, Shear or Translate;
  a table of 256, for AutoContrast, Equalize, Posterize and Solarize;
  a blend with another image, for Brightness, Color, Contrast and Sharpness.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# The lowest and highest magnitude, and how many make one unit of Pillow's
# argument: an angle in degrees, a shear, a share of the width, a factor.
# Solarize inverts pixels >= v for real v in 0..256: the same as rounding v up.
GEOMETRIC = ('Rotate', 'ShearX', 'ShearY', 'TranslateX', 'TranslateY')
ENHANCE = ('Brightness', 'Color', 'Contrast', 'Sharpness')
RANGES = {
  **dict.fromkeys(('AutoContrast', 'Equalize', 'Identity'), (0, 0, 1)),
  **dict.fromkeys(ENHANCE, (52, 972, 1024)),
  **dict.fromkeys(GEOMETRIC, (-307, 307, 1024)),
  'Posterize': (4, 7, 1),
  'Rotate': (-480, 480, 16),
  'Solarize': (1, 256, 1),
}
OPERATIONS = tuple(RANGES)


def randaugment(key, images, num_ops=3):
  """To each image its own `num_ops` random operations, with replacement.

  `images` are uint8 [B, H, W, C] of one or three channels; so is the result.
  """
  return apply(images, *draw(key, (num_ops, len(images))))


def draw(key, shape):
  """Draws operations and magnitudes, uniformly."""
  which, how = jax.random.split(key)
  operation = jax.random.randint(which, shape, 0, len(OPERATIONS))
  low, high, _ = jnp.array(list(RANGES.values())).T[:, operation]
  return operation, jax.random.randint(how, shape, low, high + 1)


def apply(images, operation, magnitude):
  """Applies to each image its operation, an index of OPERATIONS.

  `operation` and `magnitude` are [B], or [N, B] for several in turn.
  """
  size, *plane, channels = images.shape
  if images.dtype != jnp.uint8 or channels not in (1, 3):
    raise ValueError(
      f'Images are {images.dtype} with {channels} channels; RandAugment takes '
      'uint8 with 1 or 3.'
    )
  operation, magnitude = jnp.atleast_2d(operation), jnp.atleast_2d(magnitude)
  kind = [OPERATIONS.index(name) == operation for name in GEOMETRIC]
  kind = sum(i * this for i, this in enumerate(kind, 1))
  matrix = jnp.asarray(_matrices(*plane))[kind, jnp.clip(magnitude, -480, 480)]
  planes = images.reshape(size, -1, channels).transpose(0, 2, 1)
  body = lambda i, x: _apply(x, operation[i], magnitude[i], matrix[i], plane)
  planes = lax.fori_loop(0, len(operation), body, planes)
  return planes.transpose(0, 2, 1).reshape(images.shape)


def _apply(planes, operation, magnitude, matrix, plane):
  """One operation on planes [B, C, P].

  The conditions and the loop also part what XLA would fuse into one kernel, in
  which every pixel computes again all that its image shares.
  """
  size, channels, pixels = planes.shape

  def is_(*names):
    which = [operation == OPERATIONS.index(name) for name in names]
    return functools.reduce(jnp.logical_or, which)[:, None, None]

  source = lax.cond(
    is_(*GEOMETRIC).any(),
    lambda: _source(matrix, plane),
    lambda: lax.broadcasted_iota(jnp.int32, (size, pixels), 1),
  )
  enhance = is_(*ENHANCE)
  start = lax.cond(
    enhance.any(),
    lambda: _degenerate(planes, is_, plane),
    lambda: jnp.zeros_like(planes),
  )
  magnitude = magnitude[:, None, None]
  value = jnp.arange(256)
  limit = jnp.where(is_('Solarize'), magnitude, 256)
  keep = jnp.where(is_('Posterize'), -256 >> magnitude, 255)
  table = jnp.where(value < limit, value & keep, 255 - value)
  table = jnp.broadcast_to(table.astype(jnp.uint8), (size, channels, 256))
  table = _stretch(table, planes, is_('AutoContrast'), is_('Equalize'))
  moved = _take(planes, jnp.maximum(source, 0)[:, None])
  moved = jnp.where(source[:, None] < 0, 0, moved)
  end = _take(table, moved).astype(jnp.int32)
  part = jnp.where(enhance, magnitude, 1024)
  return (start + (part * (end - start) >> 10)).astype(jnp.uint8)


def _take(values, index):
  return jnp.take_along_axis(
    values, index.astype(jnp.int32), axis=-1, mode='promise_in_bounds'
  )


@functools.cache
def _matrices(height, width):
  """Pillow's affine matrices of the identity and of GEOMETRIC: [6, 961, 6].

  They map output to input in 16.16 fixed point, centres of pixels to centres.
  Pillow translates in double precision, which on our magnitudes is the same.
  The second axis is the magnitude, and negative ones count from its end.
  """
  at = np.roll(np.arange(-480, 481), -480)
  v, one, zero = at / 1024, np.ones(961), np.zeros(961)
  angle = -np.radians(at / 16 % 360)
  cos, sin = np.cos(angle).round(15), np.sin(angle).round(15)
  x, y = width / 2, height / 2
  shift_x, shift_y = x - cos * x - sin * y, y + sin * x - cos * y
  matrices = np.array(
    [
      (one, zero, zero, zero, one, zero),
      (cos, sin, shift_x, -sin, cos, shift_y),
      (one, v, zero, zero, one, zero),
      (one, zero, zero, v, one, zero),
      (one, zero, v * width, zero, one, zero),
      (one, zero, zero, zero, one, v * height),
    ]
  )
  matrices[:, 2::3] += (matrices[:, ::3] + matrices[:, 1::3]) / 2
  fixed = np.floor(matrices * 65536 + 0.5).astype(np.int32)
  return fixed.transpose(0, 2, 1)


def _source(matrix, plane):
  """For each pixel the flat index it comes from, or -1: [B, P]."""
  height, width = plane
  a, b, c, d, e, f = matrix.T[:, :, None, None]
  y, x = jnp.arange(height)[:, None], jnp.arange(width)
  from_x = (a * x + b * y + c) >> 16
  from_y = (d * x + e * y + f) >> 16
  inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
  index = jnp.where(inside, from_y * width + from_x, -1)
  return index.reshape(-1, height * width)


def _stretch(table, planes, autocontrast, equalize):
  """Puts in the tables of the images that want AutoContrast or Equalize.

  These count values, which is dear, but only one image in seven wants them: a
  loop takes the next few of each group. Groups keep images on their device.
  """
  size = len(planes)
  length = max(n for n in range(1, 65) if size % n == 0)
  group = lambda x: x.reshape(size // length, length, *x.shape[1:])
  pick = jax.vmap(lambda values, index: values[index])
  put = jax.vmap(lambda values, index, new: values.at[index].set(new))
  planes, equalize = group(planes), group(equalize)

  def step(state):
    table, waiting = state  # [G, L, C, 256], [G, L, 1, 1]
    index = lax.top_k(waiting[..., 0, 0].astype(jnp.int32), min(8, length))[1]
    chosen = pick(waiting, index)
    new = _stretched(pick(planes, index), pick(equalize, index))
    new = jnp.where(chosen, new, pick(table, index))
    return put(table, index, new), put(waiting, index, chosen & False)

  state = group(table), group(autocontrast) | equalize
  table, _ = lax.while_loop(lambda state: state[1].any(), step, state)
  return table.reshape(size, *table.shape[2:])


def _stretched(planes, equalize):
  """ImageOps's table for equalize or else autocontrast: [..., P] to 256."""
  value = jnp.arange(256)
  low = planes.min(-1, keepdims=True).astype(jnp.int32)
  high = planes.max(-1, keepdims=True).astype(jnp.int32)
  rows = 256 * jnp.arange(low.size).reshape(low.shape)
  counts = jnp.zeros(256 * low.size, jnp.int32)
  counts = counts.at[rows + planes].add(1, mode='promise_in_bounds')
  counts = counts.reshape(*low.shape[:-1], 256)
  step = (planes.shape[-1] - _take(counts, high)) // 255
  number = step // 2 + jnp.cumsum(counts, -1) - counts
  gap = high - low
  number = jnp.where(equalize, number, 255 * jnp.clip(value - low, 0, gap))
  divisor = jnp.where(equalize, step, gap)
  table = jnp.minimum(number // jnp.maximum(divisor, 1), 255)
  kind, misses = map(jnp.asarray, _autocontrast_misses())
  miss = misses[kind[low, high], value >> 3] >> (value & 7).astype(jnp.uint8)
  table -= jnp.where(equalize, 0, miss & 1)
  return jnp.where(divisor > 0, table, value).astype(jnp.uint8)


@functools.cache
def _autocontrast_misses():
  """Where Pillow's double precision falls one short of the exact quotient.

  A kind for each pair (low, high), and for each kind 256 bits, one per value.
  """
  value = np.arange(256)
  bits = np.zeros((256, 256, 32), np.uint8)
  for low in range(255):
    gap = np.arange(1, 256 - low)[:, None]
    scale = 255.0 / gap
    inexact = (value * scale + -low * scale).astype(int)
    exact = 255 * (value - low) // gap
    miss = (inexact < exact) & (low <= value) & (value <= low + gap)
    bits[low, low + 1 :] = np.packbits(miss, axis=-1, bitorder='little')
  kinds, kind = np.unique(bits.reshape(-1, 32), axis=0, return_inverse=True)
  return kind.reshape(256, 256).astype(np.int32), kinds


def _degenerate(planes, is_, plane):
  """The image from which ImageEnhance goes part of the way to the image."""
  luma, pixels = planes.astype(jnp.int32), planes.shape[2]
  if planes.shape[1] == 3:
    red, green, blue = luma[:, :1], luma[:, 1:2], luma[:, 2:]
    luma = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
  mean = (2 * luma.sum(2, keepdims=True) + pixels) // (2 * pixels)
  start = jnp.where(is_('Color'), luma, jnp.where(is_('Contrast'), mean, 0))
  smooth = _smooth(planes, plane)
  return jnp.where(is_('Sharpness'), smooth, start.astype(jnp.uint8))


def _smooth(planes, plane):
  """ImageFilter.SMOOTH: of 3 x 3 the mean, the middle counted five times."""
  height, width = plane
  pixels = height * width
  centre = planes.astype(jnp.uint16)
  # Rows follow each other, so neighbours are at fixed distances; where that
  # is wrong is a border, which stays as it was.
  padded = jnp.pad(centre, ((0, 0), (0, 0), (width + 1, width + 1)))
  three = padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]
  nine = sum(three[..., i * width : i * width + pixels] for i in range(3))
  mean = (nine + 4 * centre + 6) // jnp.uint16(13)
  border = np.ones((height, width), bool)
  border[1:-1, 1:-1] = False
  return jnp.where(border.ravel(), planes, mean.astype(jnp.uint8))
