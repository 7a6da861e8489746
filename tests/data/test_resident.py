"""Batches are pure functions of data and key, from the right images."""

import jax
import numpy as np
import pytest

from flatmatch_jax.data import resident, sources, splits
from flatmatch_jax.system import sharding

VIEWS = ('weak', 'strong')


@pytest.fixture(scope='module')
def dataset():
  rng = np.random.RandomState(0)
  images = rng.randint(0, 256, (50, 8, 8, 3), dtype=np.uint8)
  labels = np.arange(50, dtype=np.int32) % 5
  return sources.Dataset('x', images, labels, images, labels, tuple('abcde'))


def place(dataset, labeled, includes=True):
  everywhere = sharding.replicated(sharding.make_mesh())
  pool = np.arange(50) if includes else np.setdiff1d(np.arange(50), labeled)
  split = splits.Split(labeled, pool, np.zeros(0, int))
  return resident.place(dataset, split, everywhere)


def sampler(pad=0, views=('weak',), **kwargs):
  """Without strong views, which take longest to compile."""
  return resident.make_sampler(
    8, 16, views, pad, False, (0.0,) * 3, (1.0,) * 3, **kwargs
  )


def test_weak_views_are_the_images_at_their_indices(dataset):
  labeled = np.array([3, 7, 11])
  batch = jax.jit(sampler())(place(dataset, labeled), jax.random.key(0))
  index = np.asarray(batch.unlabeled['index'])
  np.testing.assert_allclose(
    batch.unlabeled['weak'], dataset.train_images[index] / 255, rtol=1e-6
  )
  np.testing.assert_array_equal(
    batch.unlabeled['truth'], dataset.train_labels[index]
  )
  wanted = {i: dataset.train_images[i] / 255 for i in labeled}
  for image, label in zip(
    batch.labeled['weak'], batch.labeled['label'], strict=True
  ):
    fits = [i for i, x in wanted.items() if np.allclose(x, image, rtol=1e-5)]
    assert [dataset.train_labels[i] for i in fits] == [int(label)]


def test_labeled_views_are_of_the_labeled_images(dataset):
  labeled = np.array([3, 7, 11])
  data, key = place(dataset, labeled), jax.random.key(0)
  make = lambda *views: jax.jit(
    resident.make_sampler(8, 16, views, 0, False, (0.0,), (1.0,))
  )
  plain = make('weak', 'weak2')(data, key)
  batch = make('weak', 'labeled_strong', 'weak2', 'labeled_weak2')(data, key)
  assert set(batch.labeled) - set(plain.labeled) == {'strong', 'weak2'}
  for name, x in plain.labeled.items():
    np.testing.assert_array_equal(batch.labeled[name], x)
  jax.tree.map(np.testing.assert_array_equal, batch.unlabeled, plain.unlabeled)
  index = labeled[batch.labeled['index']]
  images = dataset.train_images[index] / 255
  np.testing.assert_allclose(batch.labeled['weak2'], images, rtol=1e-6)
  np.testing.assert_array_equal(
    batch.labeled['label'], dataset.train_labels[index]
  )
  assert not np.allclose(batch.labeled['strong'], images)


def test_labeled_images_can_be_taken_out_of_the_pool(dataset):
  labeled = np.arange(0, 50, 2)
  within = place(dataset, labeled)
  without = place(dataset, labeled, includes=False)
  np.testing.assert_array_equal(within.unlabeled, np.arange(50))
  np.testing.assert_array_equal(without.unlabeled, np.arange(1, 50, 2))
  batch = jax.jit(sampler())(without, jax.random.key(0))
  assert (np.asarray(batch.unlabeled['index']) % 2 == 1).all()


def test_every_image_is_visited(dataset):
  draw = jax.jit(lambda d, k: sampler()(d, k).unlabeled['index'])
  data = place(dataset, np.array([0]))
  seen = {int(i) for s in range(40) for i in draw(data, jax.random.key(s))}
  assert seen == set(range(50))


def test_same_key_same_batch_and_other_key_another(dataset):
  draw = jax.jit(sampler(1, VIEWS))
  data = place(dataset, np.array([0, 1]))
  a, b, c = (draw(data, jax.random.key(s)) for s in (0, 0, 1))
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert not np.array_equal(a.unlabeled['strong'], c.unlabeled['strong'])
  assert not np.array_equal(a.unlabeled['index'], c.unlabeled['index'])


def test_sharded_batch_equals_the_batch_of_one_device(dataset):
  mesh = sharding.make_mesh()
  assert mesh.size > 1
  data = place(dataset, np.array([0, 1]))
  one = jax.jit(sampler(1, VIEWS))(data, jax.random.key(5))
  split = jax.jit(sampler(1, VIEWS, sharding=sharding.over_batch(mesh)))(
    data, jax.random.key(5)
  )
  assert len(split.unlabeled['strong'].sharding.device_set) == mesh.size
  jax.tree.map(np.testing.assert_array_equal, one, split)


def test_fixed_batches_hold_labeled_and_fixed_images(dataset):
  data = place(dataset, np.array([3]))
  data = resident.add_fixed(data, [10, 20], [4, 1])
  np.testing.assert_array_equal(data.fixed, [3, 10, 20])
  np.testing.assert_array_equal(data.fixed_labels, [3, 4, 1])
  batch = jax.jit(sampler())(data, jax.random.key(0))
  pairs = {(3, 3), (10, 4), (20, 1)}
  for image, label in zip(
    batch.fixed['weak'], batch.fixed['label'], strict=True
  ):
    fits = {
      (i, y)
      for i, y in pairs
      if np.allclose(dataset.train_images[i] / 255, image, rtol=1e-5)
    }
    assert len(fits) == 1
    assert fits.pop()[1] == int(label)


def test_images_in_rows_are_the_images(dataset):
  images = place(dataset, np.arange(3)).images
  assert images.rows.shape == (50, 8 * 8 * 3)
  assert images.shape == dataset.train_images.shape
  assert len(images) == 50
  for index in (7, slice(3, 9), np.array([[4, 4], [1, 49]])):
    np.testing.assert_array_equal(images[index], dataset.train_images[index])
