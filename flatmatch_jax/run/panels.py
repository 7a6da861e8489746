"""What is drawn of metrics.jsonl, by curves.png, the report and comparisons."""

from typing import NamedTuple

SHARE = 'share, %'  # Always drawn up to 100.
_FRACTIONS = ('used_fraction', 'largest_class')  # Of metrics.jsonl.


class Panel(NamedTuple):
  """Metrics of one unit."""

  title: str
  unit: str
  lines: dict[str, str]  # The name of each metric's line.
  # Titles of the metrics that have a panel of their own where runs are
  # compared, with a line per method.
  compared: dict[str, str]


PANELS = (
  Panel(
    'Error',
    'error, %',
    {
      'error': 'test, averaged weights',
      'error_raw': 'test, raw weights',
      'val_error': 'validation, averaged weights',
      'val_error_raw': 'validation, raw weights',
    },
    {'error': 'Test error', 'val_error': 'Validation error'},
  ),
  Panel(
    'Loss',
    'loss, nats',
    {
      'labeled_loss': 'labeled, at θ',
      'unlabeled_loss': 'unlabeled, at θ',
      'worst_loss': 'worst row, at θ + ε',
    },
    {'labeled_loss': 'Labeled loss', 'unlabeled_loss': 'Unlabeled loss'},
  ),
  Panel(
    'Pseudo-labels',
    SHARE,
    {
      'used_fraction': 'used, of all',
      'pseudo_label_accuracy': 'right, of the used',
      'largest_class': 'in the most guessed class',
    },
    {
      'used_fraction': 'Used pseudo-labels',
      'pseudo_label_accuracy': 'Right among the used',
    },
  ),
  Panel('Threshold', 'confidence', {'threshold': 'threshold'}, {}),
  Panel(
    'Gradient norms',
    'norm',
    {
      'gradient_norm': 'of the step',
      'labeled_gradient_norm': 'labeled loss',
      'unlabeled_gradient_norm': 'unlabeled loss',
      'total_gradient_norm': 'their sum',
      'offset_norm': 'offset ε',
    },
    {'gradient_norm': 'Gradient norm'},
  ),
  Panel(
    'Angle of labeled to total gradient',
    'angle, degrees',
    {'gradient_angle': 'labeled against total'},
    {'gradient_angle': 'Angle of labeled to total gradient'},
  ),
  Panel(
    'Sharpness',
    'rise of the loss, nats',
    {
      'sharpness': 'labeled loss',
      'cross_sharpness': 'unlabeled loss (cross-sharpness)',
      'held_out_sharpness': 'held-out images',
    },
    {
      'cross_sharpness': 'Cross-sharpness',
      'held_out_sharpness': 'Held-out sharpness',
    },
  ),
  Panel(
    'Calibration error',
    'error, %',
    {'calibration_error': 'test', 'val_calibration_error': 'validation'},
    {},
  ),
  Panel(
    'Learning rate', 'learning rate', {'learning_rate': 'learning rate'}, {}
  ),
)
IN_PICTURE = PANELS[:4]  # Of curves.png.


def series(rows: list[dict], key: str) -> tuple[list, list]:
  """Steps and values of a metric, where it was logged; null stays None.

  Fractions are in percent, like what they stand beside.
  """
  factor = 100 if key in _FRACTIONS else 1
  known = lambda value: isinstance(value, int | float)
  there = [row for row in rows if key in row]
  return [row['step'] for row in there], [
    factor * row[key] if known(row[key]) else None for row in there
  ]
