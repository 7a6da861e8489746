"""What a run says of its data before it begins."""

import numpy as np
import pytest

from configs import folder
from flatmatch_jax import data
from flatmatch_jax.data import splits
from flatmatch_jax.training import setup

ALONE = "Warning: only one labeled image of 'chest'"
NOTHING_LEFT = 'All images are labeled, so none are left'


@pytest.mark.parametrize(
  ('labels', 'argument', 'said'),
  [
    ([0, 0, 1, -1], '', [ALONE]),
    ([0, 0, 1, 1, -1], '', []),
    ([0, 0, 1, 1], '', [NOTHING_LEFT]),
    ([0, 0, 1], '', [ALONE, NOTHING_LEFT]),
    ([0, 0, 1], 'method=supervised', [ALONE]),
    ([0, 0, 0, 1, 1, 1], 'labels=4', []),
  ],
)
def test_few_labels_are_warned_about(labels, argument, said, capsys):
  config = folder.get_config(argument)
  labels = np.array(labels)
  images = np.zeros((len(labels), 8, 8, 3), np.uint8)
  dataset = data.Dataset(
    'folder', images, labels, images[:1], labels[:1], ('hand', 'chest')
  )
  split = splits.make(labels, 2, config.labels, 0)
  setup.tell_data(config, dataset, split)
  text = capsys.readouterr().err
  assert [line for line in (ALONE, NOTHING_LEFT) if line in text] == said
