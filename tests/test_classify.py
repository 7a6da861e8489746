"""Reports on probabilities, against numbers counted by hand."""

import numpy as np
import pytest

from flatmatch_jax import classify


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
