"""The weights that come with the package classify real photos."""

import json

import numpy as np
from PIL import Image
import pytest
from runs import ROOT

from benchmarks import cifar10_fast as study
import flatmatch_jax
from flatmatch_jax.training import exported

# The first 40 test images of CIFAR-10, row by row.
LABELS = np.array(list(map(int, '3880661631095798578670495240966545924195')))


def photos():
  picture = np.asarray(Image.open(ROOT / 'tests' / 'cifar10_test.png'))
  rows = picture.reshape(5, 32, 8, 32, 3)
  return rows.swapaxes(1, 2).reshape(-1, 32, 32, 3)


def test_cifar10_is_classified():
  classifier = flatmatch_jax.load('cifar10')
  guesses = classifier.probabilities(photos()).argmax(-1)
  assert classifier.class_names[LABELS[0]] == 'cat'
  assert np.sum(guesses != LABELS) <= 5  # 3 when they were exported.


def test_its_error_is_the_recorded_one():
  about = json.loads(
    (exported.SHIPPED / 'cifar10.safetensors.json').read_text()
  )
  config = about['run']['config']
  (cell,) = [cell for cell in study.cells() if cell.changed == study.FLAGSHIP]
  assert {key: config[key] for key in cell.fields} == cell.fields
  lines = (study.RECORDS / f'{cell.name}.jsonl').read_text().splitlines()
  last = json.loads(lines[-1])
  assert about['run']['step'] == last['step'] == config['steps']
  error = about['run']['error_percent']['test']
  assert error == pytest.approx(last['error'], abs=0.005)
