"""Reports on probabilities, against numbers counted by hand."""

import types

import jax
import numpy as np
import pytest

from flatmatch_jax.data import resident
from flatmatch_jax.system import sharding
from flatmatch_jax.training import classify


class Mean:
  """A model whose logits are the mean colours."""

  def apply(self, variables, images, train):
    logits = images.mean((1, 2)) * variables['params']
    return types.SimpleNamespace(logits=logits)


@pytest.mark.parametrize('kind', ['numpy', 'array', 'rows'])
def test_each_image_has_its_row_wherever_it_lies(kind):
  """Ten images in batches of six, made eight for the four devices."""
  mesh = sharding.make_mesh()
  images = np.random.RandomState(0).randint(0, 256, (10, 3, 3, 3), np.uint8)
  given = {
    'numpy': lambda: images,
    'array': lambda: sharding.place(images, sharding.replicated(mesh)),
    'rows': lambda: resident.Images(
      sharding.place(images.reshape(10, -1), sharding.replicated(mesh)),
      images.shape[1:],
    ),
  }[kind]()
  run = classify.make_classifier(Mean(), (0.0,) * 3, (1.0,) * 3, 6, mesh)
  (found,) = run((5.0,), {}, given)
  expected = jax.nn.softmax(5.0 * images.mean((1, 2)) / 255)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_report_counts_by_hand():
  probabilities = np.array(
    [
      [0.9, 0.1, 0.0, 0.0],  # Right.
      [0.2, 0.8, 0.0, 0.0],  # Wrong.
      [0.0, 0.6, 0.4, 0.0],  # Right.
      [0.0, 1.0, 0.0, 0.0],  # Wrong.
      [0.3, 0.3, 0.4, 0.0],  # Right.
    ]
  )
  found = classify.report(probabilities, [0, 0, 1, 2, 2])
  assert found['error'] == 40.0
  assert found['class_errors'] == [50.0, 0.0, 50.0, None]
  assert found['balanced_error'] == pytest.approx(100 / 3)
  assert found['confusion'] == [
    [1, 1, 0, 0],
    [0, 1, 0, 0],
    [0, 1, 1, 0],
    [0, 0, 0, 0],
  ]
  # Each in a bin of its own: |0.9-1|, |0.8-0|, |0.6-1|, |1-0|, |0.4-1|.
  assert found['calibration_error'] == pytest.approx(100 * 2.9 / 5)


def test_calibration_error_averages_within_a_bin():
  confident = np.tile([0.75, 0.25], (4, 1))
  calibrated = classify.report(confident, [0, 0, 0, 1])
  assert calibrated['calibration_error'] == pytest.approx(0.0)
  sure = classify.report(np.tile([1.0, 0.0], (4, 1)), [0, 0, 0, 1])
  assert sure['calibration_error'] == pytest.approx(25.0)


def test_of_each_batch_only_what_is_asked_for_is_kept():
  images = np.random.RandomState(1).randint(0, 256, (10, 3, 3, 3), np.uint8)
  run = classify.make_classifier(
    Mean(), (0.0,) * 3, (1.0,) * 3, 8, sharding.make_mesh()
  )
  (whole,) = run((5.0,), {}, images)
  sizes = []

  def keep(rows):
    sizes.append(rows.shape)
    return classify.surest(rows)

  (found,) = run((5.0,), {}, images, keep)
  assert sizes == [(8, 3), (8, 3)]
  np.testing.assert_array_equal(found[:, 0], whole.max(-1))
  np.testing.assert_array_equal(found[:, 1], whole.argmax(-1))
