"""RandAugment against Pillow, pixel by pixel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageEnhance, ImageOps
import pytest
from sklearn import datasets

from flatmatch_jax.data import randaugment

OPERATIONS = randaugment.OPERATIONS
SHAPES = ((32, 32, 3), (24, 37, 3), (32, 32, 1), (7, 2, 3))
BATCH = 96

apply = jax.jit(randaugment.apply)
randomly = jax.jit(randaugment.randaugment)
draw = jax.jit(randaugment.draw, static_argnums=1)


@functools.cache
def images_of(shape):
  """A third photographs, a third noise of few levels, and odd ones."""
  height, width, channels = shape
  random = np.random.default_rng(0)
  images = []
  for photo in datasets.load_sample_images().images:
    small = np.asarray(Image.fromarray(photo).resize((320, 240)))
    for _ in range(BATCH // 6):
      y, x = random.integers(240 - height), random.integers(320 - width)
      images.append(small[y : y + height, x : x + width, :channels])
  while len(images) < BATCH - 4:
    low, high = np.sort(random.integers(0, 256, 2))
    images.append(random.integers(low, high + 1, shape))
  images += [np.zeros(shape), np.full(shape, 255), np.full(shape, 100)]
  images.append(np.where(np.arange(height)[:, None, None] < 3, 7, images[0]))
  return np.stack(images).astype(np.uint8)


def to_pillow(image):
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def pillow(name, image, magnitude):
  """The operation as TorchSSL calls it."""
  value = magnitude / randaugment.RANGES[name][2]
  image = to_pillow(image)
  width, height = image.size
  affine = lambda *matrix: image.transform(image.size, Image.AFFINE, matrix)
  enhance = lambda kind: kind(image).enhance(value)
  out = {
    'AutoContrast': lambda: ImageOps.autocontrast(image),
    'Brightness': lambda: enhance(ImageEnhance.Brightness),
    'Color': lambda: enhance(ImageEnhance.Color),
    'Contrast': lambda: enhance(ImageEnhance.Contrast),
    'Equalize': lambda: ImageOps.equalize(image),
    'Identity': lambda: image,
    'Posterize': lambda: ImageOps.posterize(image, int(value)),
    'Rotate': lambda: image.rotate(value),
    'Sharpness': lambda: enhance(ImageEnhance.Sharpness),
    'ShearX': lambda: affine(1, value, 0, 0, 1, 0),
    'ShearY': lambda: affine(1, 0, 0, value, 1, 0),
    'Solarize': lambda: ImageOps.solarize(image, value),
    'TranslateX': lambda: affine(1, 0, value * width, 0, 1, 0),
    'TranslateY': lambda: affine(1, 0, 0, 0, 1, value * height),
  }[name]()
  return np.asarray(out).reshape(height, width, -1)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('name', OPERATIONS)
def test_operation_equals_pillow(name, shape):
  images = images_of(shape)
  low, high, _ = randaugment.RANGES[name]
  grid = np.linspace(low, high, BATCH).round().astype(np.int32)
  # Neighbouring images are alike: let each kind meet every magnitude.
  for magnitude in (grid, np.random.default_rng(1).permutation(grid)):
    operation = np.full(BATCH, OPERATIONS.index(name))
    out = apply(images, operation, magnitude)
    expected = [
      pillow(name, *pair) for pair in zip(images, magnitude, strict=True)
    ]
    np.testing.assert_array_equal(out, np.stack(expected))


def test_autocontrast_equals_pillow_for_many_ranges():
  """A sixth of all pairs of lowest and highest, one pair to a channel."""
  pairs = [(low, high) for low in range(256) for high in range(low, 256)]
  pairs += [(0, 255)] * (-len(pairs) % 288)
  for pair in np.array(pairs).reshape(-1, 96, 3, 2)[::6]:
    low, high = pair.min(-1), pair.max(-1)  # [96, 3]
    ramp = np.arange(32 * 32).reshape(32, 32, 1) % 256
    images = np.clip(ramp, low[:, None, None], high[:, None, None])
    images = images.astype(np.uint8)
    out = apply(images, np.zeros(96, int), np.zeros(96, int))
    expected = [pillow('AutoContrast', image, 0) for image in images]
    np.testing.assert_array_equal(out, np.stack(expected))


def test_rotation_equals_pillow_on_every_angle():
  low, high, _ = randaugment.RANGES['Rotate']
  shape = (24, 37, 3)
  image = images_of(shape)[:1]
  rotate = OPERATIONS.index('Rotate')
  for start in range(low, high + 1, BATCH):
    angles = np.minimum(np.arange(start, start + BATCH), high)
    images = np.repeat(image, BATCH, axis=0)
    out = apply(images, np.full(BATCH, rotate), angles)
    expected = [pillow('Rotate', image[0], angle) for angle in angles]
    np.testing.assert_array_equal(out, np.stack(expected))


@pytest.mark.parametrize(('size', 'tile'), [(96, 1), (95, 7), (95, 64)])
def test_images_of_a_batch_do_not_mix(size, tile, monkeypatch):
  """In one group or one for each device, in one turn of the loop or many."""
  monkeypatch.setattr(randaugment, 'TILE', tile * 32 * 32)
  images = images_of((32, 32, 3))[:size]
  operation, magnitude = map(np.asarray, draw(jax.random.key(3), (size,)))
  # A function of its own, since `apply` is compiled for the usual tile.
  out = jax.jit(lambda *x: randaugment.apply(*x))(images, operation, magnitude)
  for i in range(size):
    name = OPERATIONS[operation[i]]
    expected = pillow(name, images[i], magnitude[i])
    np.testing.assert_array_equal(out[i], expected, err_msg=name)


def test_operations_are_uniform_and_magnitudes_fill_their_ranges():
  operation, magnitude = map(np.asarray, draw(jax.random.key(0), (140_000,)))
  counts = np.bincount(operation, minlength=14)
  assert len(counts) == 14
  assert np.abs(counts - 10_000).max() < 500  # Five standard deviations.
  for index, (low, high, _) in enumerate(randaugment.RANGES.values()):
    these = magnitude[operation == index]
    assert (these.min(), these.max()) == (low, high)
    deviation = np.sqrt(((high - low + 1) ** 2 - 1) / 12 / len(these))
    assert abs(these.mean() - (low + high) / 2) <= 4 * deviation


def test_each_image_draws_its_own_and_the_key_decides():
  image = images_of((32, 32, 3))[:1]
  images = np.repeat(image, BATCH, axis=0)
  out = np.asarray(randomly(jax.random.key(0), images))
  again = np.asarray(randomly(jax.random.key(0), images))
  other = np.asarray(randomly(jax.random.key(1), images))
  assert out.dtype == np.uint8
  assert out.shape == images.shape
  np.testing.assert_array_equal(out, again)
  # Rarely do two images draw three times what has no magnitude.
  assert len(np.unique(out.reshape(BATCH, -1), axis=0)) > 0.95 * BATCH
  assert (out != other).any((1, 2, 3)).mean() > 0.95


def test_randaugment_is_three_operations_in_turn():
  """The whole chain in Pillow, from the draws that the key gives."""
  images = images_of((32, 32, 3))
  key = jax.random.key(5)
  operation, magnitude = map(np.asarray, draw(key, (3, BATCH)))
  out = randomly(key, images)
  for i, image in enumerate(images):
    for o, m in zip(operation[:, i], magnitude[:, i], strict=True):
      image = pillow(OPERATIONS[o], image, m)
    np.testing.assert_array_equal(out[i], image)


def test_other_images_are_refused():
  with pytest.raises(ValueError, match='4 channels'):
    apply(jnp.zeros((2, 8, 8, 4), jnp.uint8), jnp.zeros(2), jnp.zeros(2))
  with pytest.raises(ValueError, match='float32'):
    apply(jnp.zeros((2, 8, 8, 3)), jnp.zeros(2), jnp.zeros(2))


@pytest.mark.parametrize('shape', SHAPES[1:], ids=str)
def test_the_way_of_tpus_gives_the_same(shape):
  """What stands for gathers and scatters there."""
  height, width, channels = shape
  images = images_of(shape)
  rows = randaugment.pack(jnp.asarray(images)).reshape(BATCH, -1)
  move = jax.jit(randaugment.move_by_axes, static_argnums=2)
  for kind, name in enumerate(randaugment.GEOMETRIC):
    low, high, _ = randaugment.RANGES[name]
    magnitude = np.linspace(low, high, BATCH).round().astype(np.int32)
    matrix = randaugment._matrices(height, width)[kind, magnitude]
    out = move(rows, matrix, shape).reshape(images.shape[:3])
    expected = apply(images, np.full(BATCH, OPERATIONS.index(name)), magnitude)
    np.testing.assert_array_equal(randaugment.unpack(out, channels), expected)
  values = np.asarray(rows) & 255
  count = [np.bincount(row, minlength=256) for row in values]
  np.testing.assert_array_equal(
    jax.jit(randaugment.count_digits)(values), count
  )
  table = np.random.default_rng(0).integers(0, 256, (BATCH, 256))
  out = jax.jit(randaugment.take_by_digits)(table, values)
  np.testing.assert_array_equal(out, np.take_along_axis(table, values, 1))
