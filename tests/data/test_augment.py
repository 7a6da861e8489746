"""The weak and strong augmentations and the normalisation."""

import functools
import re

import jax
import numpy as np
import pytest

from flatmatch_jax.data import augment, on_host, randaugment
from flatmatch_jax.system import sharding

PAD = 4


def images_of(batch, shape=(12, 14, 3)):
  return np.random.default_rng(0).integers(0, 256, (batch, *shape), np.uint8)


cutout = jax.jit(augment.cutout)


@functools.partial(jax.jit, static_argnames='flip')
def weak(key, images, flip):
  return augment.weak(key, images, PAD, flip)


def crops(image, flip):
  """Every crop that numpy makes of the padded image, by (flipped, y, x)."""
  height, width, _ = image.shape
  found = {}
  for flipped in (False, True) if flip else (False,):
    source = image[:, ::-1] if flipped else image
    pads = ((PAD, PAD), (PAD, PAD), (0, 0))
    padded = np.pad(source, pads, mode='reflect')
    for y in range(2 * PAD + 1):
      for x in range(2 * PAD + 1):
        crop = padded[y : y + height, x : x + width]
        found[crop.tobytes()] = (flipped, y, x)
  return found


@pytest.mark.parametrize('flip', [False, True])
def test_weak_is_a_crop_of_the_padded_image(flip):
  """Each result is one of numpy's crops; all crops come, equally often."""
  image = images_of(1)[0]
  images = np.repeat(image[None], 16_200, axis=0)
  known = crops(image, flip)
  assert len(known) == (162 if flip else 81)
  out = np.asarray(weak(jax.random.key(0), images, flip))
  assert out.dtype == np.uint8
  counts = dict.fromkeys(known.values(), 0)
  for result in out:
    counts[known[result.tobytes()]] += 1
  expected = len(images) / len(known)
  worst = np.abs(np.array(list(counts.values())) - expected).max()
  assert worst < 5 * np.sqrt(expected)


def test_weak_keeps_images_apart():
  images = images_of(32)
  for image, out in zip(
    images, np.asarray(weak(jax.random.key(1), images, True)), strict=True
  ):
    assert out.tobytes() in crops(image, True)


def test_without_pad_and_flip_weak_is_the_identity():
  images = images_of(4)
  out = augment.weak(jax.random.key(0), images, 0, False)
  np.testing.assert_array_equal(out, images)


def test_pad_as_large_as_the_image_is_refused():
  with pytest.raises(ValueError, match='12 x 14'):
    augment.weak(jax.random.key(0), images_of(1), 12, True)


def pillow_cutout(pixels, centre, side):
  image = on_host.cutout(on_host.from_array(pixels), centre, side)
  return np.asarray(image).reshape(pixels.shape)


@pytest.mark.parametrize(
  'shape', [(32, 32, 3), (24, 37, 3), (32, 32, 1)], ids=str
)
def test_cutout_equals_pillow(shape):
  images = images_of(96, shape)
  random = np.random.default_rng(2)
  for _ in range(8):
    # Corners, edges and empty squares more often than chance has them.
    centre = random.choice([0, 1, 512, 1023, *range(0, 1024, 7)], (96, 2))
    side = random.choice([0, 1, 31, 32, 512, *range(0, 513, 3)], 96)
    out = cutout(images, centre, side)
    expected = map(pillow_cutout, images, centre, side)
    np.testing.assert_array_equal(out, np.stack(list(expected)))


def test_cutout_draws_fill_their_ranges():
  centre, side = map(np.asarray, augment.draw_cutout(jax.random.key(0), 20_000))
  assert (centre.min(), centre.max()) == (0, 1023)
  assert (side.min(), side.max()) == (0, 512)
  assert abs(centre.mean() - 511.5) < 10
  assert abs(side.mean() - 256) < 5
  assert abs(np.corrcoef(centre.T)[0, 1]) < 0.05


def test_strong_is_randaugment_then_cutout_then_weak():
  images = images_of(16, (16, 16, 1))
  key = jax.random.key(2)
  strong = jax.jit(lambda key, x: augment.strong(key, x, PAD, True))
  keys = jax.random.split(key, 3)
  expected = jax.jit(randaugment.randaugment)(keys[0], images)
  expected = cutout(expected, *augment.draw_cutout(keys[1], 16))
  expected = weak(keys[2], expected, True)
  np.testing.assert_array_equal(strong(key, images), expected)
  assert strong(key, images).dtype == np.uint8
  assert (strong(jax.random.key(3), images) != expected).any()


def test_images_stay_on_their_device():
  """All that devices tell each other is how often their loops turn."""
  split = sharding.over_batch(sharding.make_mesh())
  images = jax.ShapeDtypeStruct((32, 16, 16, 3), np.uint8, sharding=split)
  strong = jax.jit(
    lambda key, x: augment.strong(key, x, PAD, True, split.num_devices),
    out_shardings=split,
  )
  text = strong.lower(jax.random.key(0), images).compile().as_text()
  assert 'num_partitions=8' in text
  talk = '|'.join(('all-', 'collective-', 'reduce-scatter', 'ragged-'))
  lines = re.findall(rf'= (.*?) (?:{talk})\S*\(', text)
  kinds, operations = 5, 3
  assert [line.partition('{')[0] for line in lines] == [
    f's32[{kinds},{operations}]'
  ]


def test_normalize_equals_numpy():
  images = images_of(8)
  mean, std = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]
  out = augment.normalize(images, mean, std)
  assert out.dtype == np.float32
  expected = (images / 255 - np.array(mean)) / np.array(std)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_medium_view_is_a_strong_one_with_one_operation():
  view = augment.make_view(0, False, (0.0,), (1.0,))
  images, key = images_of(4, (8, 8, 3)), jax.random.key(0)
  medium = jax.jit(functools.partial(view, 'medium'))(key, images)
  one = jax.jit(lambda *x: augment.strong(*x, 0, False, operations=1))
  np.testing.assert_allclose(medium, one(key, images) / 255, rtol=1e-6)
