"""Which images the benchmark of the labeling order labels."""

import types

import numpy as np

from benchmarks import label_choice


def test_first_images_and_one_of_each_class():
  labels = np.array([0, 0, 0, 1, 0, 2, 0, 0])
  order = np.array([0, 1, 2, 4, 6, 3, 7, 5])
  assert label_choice.first_of(order, labels, 5) == [0, 1, 2, 3, 5]


def test_orders_hold_images_once():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (12, 8, 8, 1), np.uint8)
  dataset = types.SimpleNamespace(train_images=images, train_labels=images)
  for name in ('chosen', 'random'):
    order = label_choice.order_of(dataset, name, seed=0)
    assert sorted(order) == list(range(12))
