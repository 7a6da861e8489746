"""Pseudo-labels are counted as right only where somebody knows."""

from conftest import TinyNet
import numpy as np
import pytest

from configs import digits
from flatmatch_jax import data, models
from flatmatch_jax.data.splits import Split
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import loop, setup


@pytest.mark.parametrize(
  ('labels', 'labeled', 'known'),
  [
    ([0, 1, -1, -1], [0, 1], False),
    ([0, 1, 1, -1], [0, 1], True),  # Of a draw of the labels.
    ([0, 1, 1, 0], [0, 1, 2, 3], True),  # There is no other image.
  ],
)
def test_truth_is_that_of_images_that_do_not_train(labels, labeled, known):
  split = Split(np.array(labeled), np.arange(4), np.array([], int))
  assert setup.has_truth(np.array(labels), split) == known


def test_unknown_truth_is_not_logged(tmp_path, monkeypatch):
  """A known one is, as test_run.py sees."""
  full = data.load('digits')
  labels = full.train_labels.copy()
  labels[100:] = -1
  dataset = full._replace(train_labels=labels)
  monkeypatch.setattr(data, 'from_config', lambda config: dataset)
  monkeypatch.setattr(
    models,
    'create',
    lambda name, num_classes, *_, **kwargs: TinyNet(num_classes),
  )
  config = digits.get_config('method=pseudo_label,labels=all')
  config.update(
    {'steps': 2, 'log_every': 1, 'batch_size': 16, 'probe_every': 0}
  )
  config.unlabeled_batch_size = 16
  loop.train_and_evaluate(config, str(tmp_path))
  for row in Workdir(tmp_path).metrics():
    assert 'used_fraction' in row
    assert 'pseudo_label_accuracy' not in row
