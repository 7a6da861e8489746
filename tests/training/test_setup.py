"""What a run says of its data before it begins."""

import numpy as np
import pytest

from configs import folder
from flatmatch_jax import data
from flatmatch_jax.data import splits
from flatmatch_jax.training import setup

ALONE = "Warning: only one labeled image of 'chest'"
NOTHING_LEFT = 'All images are labeled, so none are left'
FEW_LEFT = 'Only 1 image without a label'
NOT_USED = '4 unlabeled (not used)'
STAY = 'stay in the unlabeled pool'
NEGATIVE = 'may be negative'


@pytest.mark.parametrize(
  ('labels', 'argument', 'expected'),
  [
    ([0, 0, 1, -1, -1, -1], '', [ALONE, STAY, NEGATIVE]),
    ([0, 0, 1, 1, -1], '', [FEW_LEFT, STAY, NEGATIVE]),
    ([0, 0, 1, 1, -1], 'method=fixmatch', [FEW_LEFT, STAY]),
    ([0, 0, 1, 1], '', [NOTHING_LEFT, STAY, NEGATIVE]),
    ([0, 0, 1], '', [ALONE, NOTHING_LEFT, STAY, NEGATIVE]),
    ([0, 0, 1, -1], 'method=supervised', [ALONE, NOT_USED]),
    ([0, 0, 0, 0, 1, 1, 1, 1], 'labels=4', [STAY, NEGATIVE]),
  ],
)
def test_log_names_what_a_run_learns_from(labels, argument, expected, capsys):
  config = folder.get_config(argument)
  labels = np.array(labels)
  images = np.zeros((len(labels), 8, 8, 3), np.uint8)
  dataset = data.Dataset(
    'folder', images, labels, images[:1], labels[:1], ('hand', 'chest')
  )
  split = splits.make(labels, 2, config.labels, 0)
  setup.tell_data(config, dataset, split)
  text = capsys.readouterr().err
  said = (ALONE, NOTHING_LEFT, FEW_LEFT, NOT_USED, STAY, NEGATIVE)
  assert [words for words in said if words in text] == expected
