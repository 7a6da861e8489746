"""RandAugment on the device, bit for bit what Pillow computes.

https://arxiv.org/abs/1909.13719 with the operations and ranges of TorchSSL.

All arithmetic is of whole numbers, and exact; magnitudes lie on a fine grid. So
every device gives the same pixels. A pixel is one int32, its channels in the
bytes, and moves as one. Operations that compute alike are a kind, and every
turn sorts the images by kind: a loop over the images of a kind, a tile at a
time, does to them what they drew and nothing else. TPUs are slow at gathers and
scatters, and do the same by comparisons.
"""

import functools
import math

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
# The pixels of a tile: few enough for a core's cache, enough to repay a turn
# of the loop.
TILE = 2**16


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
  channels = images.shape[-1]
  pixels = apply_packed(pack(images), operation, magnitude, channels)
  return unpack(pixels, channels)


def pack(images):
  """From uint8 [B, H, W, C] to int32 [B, H, W], the first channel lowest."""
  channels = images.shape[-1]
  if images.dtype != jnp.uint8 or channels not in (1, 3):
    raise ValueError(
      f'Images are {images.dtype} with {channels} channels; RandAugment takes '
      'uint8 with 1 or 3.'
    )
  return _join([images[..., i].astype(jnp.int32) for i in range(channels)])


def unpack(pixels, channels):
  """The inverse of `pack`."""
  return (pixels[..., None] >> 8 * jnp.arange(channels)).astype(jnp.uint8)


def _join(values):
  return sum(value << 8 * i for i, value in enumerate(values))


def _split(pixels, channels):
  return [pixels >> 8 * i & 255 for i in range(channels)]


def apply_packed(pixels, operation, magnitude, channels, groups=1):
  """`apply` on packed images.

  Images are sorted within equal groups, and do not leave them: one for each
  device, where the images are spread over several. The pixels are the same.
  """
  size, *plane = pixels.shape
  shape = *plane, channels
  groups = math.gcd(size, groups)
  length = size // groups
  tile = min(length, max(1, TILE // math.prod(plane)))
  group = lambda x: x.reshape(-1, groups, length)
  operation, magnitude = group(operation), group(magnitude)
  kind = jnp.asarray(_kinds())[operation]
  order = jnp.argsort(kind, axis=-1)
  count = (kind == jnp.arange(len(KINDS)).reshape(-1, 1, 1, 1)).sum(-1)
  first = jnp.cumsum(count, 0) - count  # Both are [kinds, N, groups].
  # Of the slowest device. Not in the loops: XLA for CPUs keeps sums over
  # devices in order only outside of loops, and devices that wait in different
  # ones would do so for ever.
  all_turns = -(-count.max(-1) // tile)
  pick = jax.vmap(lambda values, index: values.at[index].get(mode='clip'))
  put = jax.vmap(
    lambda values, index, new: values.at[index].set(new, mode='drop')
  )

  def turn(n, pixels):
    for i, (_, prepare, finish) in enumerate(KINDS):
      turns = all_turns[i, n]

      def step(t, pixels, i=i, prepare=prepare, finish=finish, turns=turns):
        place = t * tile + jnp.arange(tile)
        index = pick(order[n], first[i, n][:, None] + place)
        index = jnp.where(place < count[i, n][:, None], index, length)
        flat = lambda x: pick(x, index).reshape(groups * tile, *x.shape[2:])
        these = flat(pixels)
        given = these, flat(operation[n]), flat(magnitude[n])
        prepared = _apart(t < turns, lambda *x: prepare(*x, shape), *given)
        new = finish(these, shape, *prepared)
        return put(pixels, index, new.reshape(groups, tile, -1))

      pixels = lax.fori_loop(0, turns, step, pixels)
    return pixels

  rows = pixels.reshape(groups, length, -1)
  return lax.fori_loop(0, len(kind), turn, rows).reshape(pixels.shape)


def _apart(true, function, *arguments):
  """Calls the function, in a condition that always holds.

  XLA for CPUs would fuse it into its consumer, in which every pixel computes
  again all that its image shares.
  """
  out = jax.eval_shape(function, *arguments)
  zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
  return lax.cond(true, function, zeros, *arguments)


def _is(operation, *names):
  which = [operation == OPERATIONS.index(name) for name in names]
  return functools.reduce(jnp.logical_or, which)


# A kind prepares, from packed images [K, P] with their operations and
# magnitudes [K], what it then needs to finish them.


def _moves(pixels, operation, magnitude, shape):
  """The matrices, and for each pixel the flat index it comes from, or -1."""
  height, width, _ = shape
  kind = sum(i * _is(operation, name) for i, name in enumerate(GEOMETRIC))
  at = jnp.clip(magnitude, -480, 480)
  matrix = jnp.asarray(_matrices(height, width))[kind, at]
  row, column = _source(matrix, *_grid(shape))
  inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
  index = jnp.where(inside, row * width + column, -1)
  return matrix, index.reshape(pixels.shape)


def _source(matrix, y, x):
  """The row and column from which the pixel at (y, x) comes."""
  a, b, c, d, e, f = matrix.T[:, :, None, None]
  return (d * x + e * y + f) >> 16, (a * x + b * y + c) >> 16


def _grid(shape):
  return jnp.arange(shape[0])[:, None], jnp.arange(shape[1])


def _move(pixels, shape, matrix, index):
  """Moves pixels: by a gather, but on TPUs by comparisons."""

  def gather(pixels, matrix, index):
    del matrix
    moved = _take(pixels, jnp.maximum(index, 0))
    return jnp.where(index < 0, 0, moved)

  def compare(pixels, matrix, index):
    del index
    return move_by_axes(pixels, matrix, shape)

  return lax.platform_dependent(
    pixels, matrix, index, tpu=compare, default=gather
  )


def move_by_axes(pixels, matrix, shape):
  """Moves along rows and then along columns, with height + width comparisons.

  In a column of the result at most two pixels, neighbours, come from one row of
  the image, since no operation enlarges twofold: so each row moves twice.
  """
  y, x = _grid(shape)
  images = pixels.reshape(-1, *shape[:2])
  d, e, f = matrix.T[3:, :, None, None]
  first = -((d * x + f - (y << 16)) // e)  # The first to come from row y or on.

  def along_row(at):
    column = _source(matrix, at, x)[1]
    return jnp.where(column[..., None] == x, images[:, :, None], 0).sum(-1)

  def along_column(values):
    return jnp.where(row[:, :, None] == y, values[:, None], 0).sum(2)

  row = _source(matrix, y, x)[0]
  again = row == _source(matrix, y - 1, x)[0]
  moved = [along_column(along_row(at)) for at in (first, first + 1)]
  return jnp.where(again, moved[1], moved[0]).reshape(pixels.shape)


def _take(values, index):
  return jnp.take_along_axis(values, index, axis=-1, mode='promise_in_bounds')


@functools.cache
def _matrices(height, width):
  """Pillow's affine matrices of GEOMETRIC: [5, 961, 6].

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


def _colouring(pixels, operation, magnitude, shape):
  """What `_colour` takes, for each image."""
  count = pixels.shape[1]
  luma = _luma(_split(pixels, shape[-1])).sum(1)
  mean = (2 * luma + count) // (2 * count)
  columns = (
    jnp.where(_is(operation, 'Solarize'), magnitude, 256),
    jnp.where(_is(operation, 'Posterize'), -256 >> magnitude, 255),
    jnp.where(_is(operation, *ENHANCE), magnitude, 1024),
    jnp.where(_is(operation, 'Contrast'), mean, 0),
    jnp.where(_is(operation, 'Color'), 255, 0),
  )
  return tuple(column[:, None] for column in columns)


def _luma(values):
  if len(values) == 1:
    return values[0]
  red, green, blue = values
  return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _colour(pixels, shape, limit, keep, part, grey, use_luma):
  """Inverts from `limit`, keeps bits, and goes `part` of the way from grey."""
  values = _split(pixels, shape[-1])
  start = grey + (_luma(values) & use_luma)
  ends = [jnp.where(v < limit, v & keep, 255 - v) for v in values]
  return _join([_blend(start, end, part) for end in ends])


def _blend(start, end, part):
  return start + (part * (end - start) >> 10)


def _autocontrast(pixels, operation, magnitude, shape):
  """The tables of ImageOps.autocontrast: [K, C, 256]."""
  del operation, magnitude
  planes = jnp.stack(_split(pixels, shape[-1]), 1).astype(jnp.uint8)
  low = planes.min(-1, keepdims=True).astype(jnp.int32)
  high = planes.max(-1, keepdims=True).astype(jnp.int32)
  value, gap = jnp.arange(256), high - low
  table = 255 * jnp.clip(value - low, 0, gap) // jnp.maximum(gap, 1)
  kind, misses = map(jnp.asarray, _autocontrast_misses())
  bits = misses[kind[low, high][..., 0]][..., None] >> jnp.arange(8) & 1
  return (jnp.where(gap > 0, table - bits.reshape(table.shape), value),)


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
  return kind.reshape(256, 256).astype(np.int32), kinds.astype(np.int32)


def _equalize(pixels, operation, magnitude, shape):
  """The tables of ImageOps.equalize: [K, C, 256]."""
  del operation, magnitude
  count = jnp.stack([_count(v) for v in _split(pixels, shape[-1])], 1)
  value = jnp.arange(256)
  high = jnp.max(jnp.where(count > 0, value, 0), -1, keepdims=True)
  of_high = jnp.where(value == high, count, 0).sum(-1, keepdims=True)
  step = (pixels.shape[1] - of_high) // 255
  number = step // 2 + jnp.cumsum(count, -1) - count
  table = jnp.minimum(number // jnp.maximum(step, 1), 255)
  return (jnp.where(step > 0, table, value),)


def _count(values):
  """How often each of 256 values is in a row."""

  @jax.vmap
  def scatter(values):
    none = jnp.zeros(256, jnp.int32)
    return none.at[values].add(1, mode='promise_in_bounds')

  return lax.platform_dependent(values, tpu=count_digits, default=scatter)


def count_digits(values):
  """Counts pairs of hexadecimal digits, as a product of matrices.

  Exact below 2^24 pixels, which float32 counts.
  """
  high, low = _digits(values)
  pairs = jnp.einsum(
    'kph,kpl->khl', high, low, preferred_element_type=jnp.float32
  )
  return pairs.reshape(-1, 256).astype(jnp.int32)


def _digits(values):
  """Which of 16 each of the two is, exact in any precision."""
  is_digit = lambda x: x[..., None] == jnp.arange(16)
  return [is_digit(x).astype(jnp.bfloat16) for x in (values >> 4, values & 15)]


def _look_up(pixels, shape, table):
  values = _split(pixels, shape[-1])
  take = functools.partial(
    lax.platform_dependent, tpu=take_by_digits, default=_take
  )
  return _join([take(table[:, i], value) for i, value in enumerate(values)])


def take_by_digits(table, values):
  """The row of 16 entries by a product, and one of them by the other digit.

  Entries are at most 255, which bfloat16 has exactly.
  """
  high, low = _digits(values)
  rows = table.reshape(-1, 16, 16).astype(jnp.bfloat16)
  found = jnp.einsum(
    'kph,khl->kpl', high, rows, preferred_element_type=jnp.bfloat16
  )
  return (found * low).sum(-1).astype(jnp.int32)


def _smooth(pixels, operation, magnitude, shape):
  """Sums of 3 x 3: of the outer channels, 16 bits each, and of the middle one.

  Rows follow each other, so neighbours are at fixed distances; where that is
  wrong is a border.
  """
  del operation
  width, count = shape[1], pixels.shape[1]
  padded = jnp.pad(pixels, ((0, 0), (width + 1, width + 1)))

  def nine(values):
    three = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    return sum(three[:, i * width : i * width + count] for i in range(3))

  return nine(padded & 0xFF00FF), nine(padded >> 8 & 255), magnitude[:, None]


def _sharpen(pixels, shape, outer, middle, part):
  """Goes part of the way from ImageFilter.SMOOTH to the image.

  That is the mean of 3 x 3, the centre counted five times; a border stays.
  """
  height, width, channels = shape
  border = np.ones((height, width), bool)
  border[1:-1, 1:-1] = False
  sums = outer & 0xFFFF, middle, outer >> 16
  out = []
  for value, nine in zip(_split(pixels, channels), sums, strict=False):
    mean = (nine + 4 * value + 6) * 20165 >> 18  # A thirteenth, to 255.
    start = jnp.where(border.ravel(), value, mean)
    out.append(_blend(start, value, part))
  return _join(out)


KINDS = (
  (GEOMETRIC, _moves, _move),
  (
    ('Brightness', 'Color', 'Contrast', 'Posterize', 'Solarize'),
    _colouring,
    _colour,
  ),
  (('AutoContrast',), _autocontrast, _look_up),
  (('Equalize',), _equalize, _look_up),
  (('Sharpness',), _smooth, _sharpen),
)


@functools.cache
def _kinds():
  """The kind of each of OPERATIONS; Identity has none, which is the last."""
  kinds = np.full(len(OPERATIONS), len(KINDS))
  for kind, (names, *_) in enumerate(KINDS):
    kinds[[OPERATIONS.index(name) for name in names]] = kind
  return kinds
