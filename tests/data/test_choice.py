"""Which images come first."""

import numpy as np
import pytest

from flatmatch_jax.data import choice


def features(rng, number, dims=5):
  found = rng.normal(size=(number, dims))
  return found / np.linalg.norm(found, axis=1, keepdims=True)


def gain(distances, nearest, weights, row):
  return (np.maximum(nearest - distances[row], 0) * weights).sum()


@pytest.mark.parametrize('known', [0, 3])
def test_order_is_greedy(known):
  """The heap finds what trying all images in each turn finds."""
  rng = np.random.default_rng(known)
  new, old = features(rng, 30), features(rng, known)
  weights = rng.uniform(0.1, 1, 30)
  order = choice.spread(new, old, weights)
  assert sorted(order) == list(range(30))
  distances = ((new[:, None] - new) ** 2).sum(-1)
  nearest = np.full(30, 4.0)
  if known:
    nearest = ((old[:, None] - new) ** 2).sum(-1).min(0)
  for turn, row in enumerate(order):
    gains = [gain(distances, nearest, weights, r) for r in order[turn:]]
    assert gains[0] == pytest.approx(max(gains), abs=1e-4)
    nearest = np.minimum(nearest, distances[row])


def clusters(rng, sizes):
  """Rows around as many axes, and the number of each row's axis."""
  group = np.repeat(np.arange(len(sizes)), sizes)
  found = (
    np.eye(len(sizes))[group]
    + rng.normal(0, 0.05, (sum(sizes),) * 2)[:, : len(sizes)]
  )
  return found / np.linalg.norm(found, axis=1, keepdims=True), group


def test_each_cluster_comes_before_any_comes_twice():
  found, group = clusters(np.random.default_rng(0), [40, 5, 20, 10])
  assert sorted(group[choice.spread(found)[:4]]) == [0, 1, 2, 3]


def test_clusters_with_labels_come_last():
  found, group = clusters(np.random.default_rng(0), [40, 5, 20, 10])
  labeled = found[group != 1]
  assert group[choice.spread(found, labeled)[0]] == 1


def test_weights_decide():
  found, group = clusters(np.random.default_rng(0), [40, 5, 20, 10])
  order = choice.spread(found, weights=np.where(group == 3, 1.0, 0.01))
  assert group[order[0]] == 3


def test_doubt_is_large_where_margins_are_small_and_guesses_rare():
  sure, unsure, rare = [0.9, 0.05, 0.05], [0.5, 0.4, 0.1], [0.05, 0.05, 0.9]
  doubt = choice.doubt(np.array([sure, unsure, rare]))
  assert doubt[1] == doubt.max()
  assert doubt[2] == pytest.approx(np.sqrt(2) * doubt[0])


def test_order_is_of_doubt_and_of_what_is_labeled():
  rng = np.random.default_rng(0)
  size = (12, choice.SIDE, choice.SIDE, 3)
  pixels = rng.integers(0, 256, size, dtype=np.uint8)
  probs = np.full((10, 2), [0.99, 0.01])
  probs[7] = [0.5, 0.5]
  assert choice.order(pixels[:10], pixels[10:], probs)[0] == 7
  # An image that is labeled already comes last.
  assert choice.order(pixels[:10], pixels[3:4])[-1] == 3


def test_images_that_a_model_is_sure_of_come_late(monkeypatch):
  """However many unsure ones look like them."""
  rng = np.random.default_rng(0)
  size = (30, choice.SIDE, choice.SIDE, 3)
  pixels = rng.integers(0, 256, size, dtype=np.uint8)
  probs = rng.dirichlet((1, 1, 1), 30)
  monkeypatch.setattr(choice, 'UNSURE', 5)
  order = choice.order(pixels, pixels[:0], probs)
  assert sorted(order) == list(range(30))
  doubt = choice.doubt(probs)
  assert set(order[:5]) == set(np.argsort(-doubt)[:5])
  assert (np.diff(doubt[order[5:]]) <= 0).all()


def test_shuffling_goes_by_names_alone():
  paths = [f'unlabeled/{i}.png' for i in range(50)]
  order = [paths[row] for row in choice.shuffled(paths)]
  assert sorted(order) != order
  fewer = paths[::-3]
  found = [fewer[row] for row in choice.shuffled(fewer)]
  assert found == [path for path in order if path in fewer]


def test_features_are_of_shapes_not_of_brightness():
  images = np.random.default_rng(0).integers(
    50, 150, (9, choice.SIDE, choice.SIDE, 3), dtype=np.uint8
  )
  images[0] = 77  # No edges: no direction, and still a number.
  found = choice.embed(images)
  np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)
  brighter = choice.embed(images + np.uint8(60))
  np.testing.assert_allclose(brighter @ brighter.T, found @ found.T, atol=0.05)
  other = choice.embed(images[:, ::-1, ::2].repeat(2, 2))
  assert np.abs(other @ other.T - found @ found.T).max() > 0.1
