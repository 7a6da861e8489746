"""Speaks up when the numbers of a run go wrong."""

from collections.abc import Callable
import math

from flatmatch_jax import logging
from flatmatch_jax.train_step import MUST_BE_FINITE
from flatmatch_jax.types import UserError

# How long pseudo-labels may be none or of one class before that is said: for
# this share of the run and this many rows of the log. Thresholds that nothing
# passes at first are usual.
_SHARE = 0.05
_ROWS = 10


class NotFiniteError(UserError):
  """Too many steps in a row had numbers that are not finite."""


class Watch:
  """Looks at steps and rows of a run of `steps` steps.

  More than `max_skipped` skipped steps in a row end it. Warnings name the run
  where it has a `name`.
  """

  def __init__(self, steps: int, max_skipped: int, name: str = ''):
    self._steps, self._max_skipped = steps, max_skipped
    self._warning = f'Warning: {name}: ' if name else 'Warning: '
    self._since = 0  # The step of the first of the collapsed rows,
    self._rows = 0  # and their number.
    self._told = False
    self._skipped = 0

  def step(
    self, step: int, metrics, last_saved: Callable[[], int | None]
  ) -> None:
    """Raises NotFiniteError after too many steps that were not finite.

    Args:
      step: how many steps are taken.
      metrics: of this step, computed.
      last_saved: gives the step of the last checkpoint.
    """
    number = int(metrics['skipped_in_a_row'])
    if number <= self._max_skipped:
      return
    broken = [
      f'{name} {float(metrics[name])}'
      for name in MUST_BE_FINITE
      if name in metrics and not math.isfinite(metrics[name])
    ]
    kept = 'nothing was saved before'
    if (saved := last_saved()) is not None:
      kept = f'the checkpoint of step {saved} is intact'
    raise NotFiniteError(
      f'Step {step} is the last of {number} in a row whose numbers are not '
      f'finite ({", ".join(broken) or "running statistics or thresholds"}), '
      f'and config.max_skipped={self._max_skipped}: the run stops; {kept}. '
      'Start in another --workdir with a lower config.learning_rate, or '
      'with config.dtype=float32 if it was bfloat16.'
    )

  def row(self, step: int, row: dict) -> None:
    """Warns of what a row of the log shows."""
    if (skipped := int(row['skipped_steps'])) > self._skipped:
      self._skipped = skipped
      logging.say(
        f'{self._warning}{skipped} of {step} steps were skipped, because a '
        'loss or the gradient was not finite.'
      )
    self._look_for_collapse(step, row)

  def _look_for_collapse(self, step, row):
    """Warns once of pseudo-labels that are none or of one class for long."""
    if 'used_fraction' not in row or self._told:
      return
    none = row['used_fraction'] == 0
    if not none and row['largest_class'] < 1:
      self._rows = 0
      return
    if not self._rows:
      self._since = step
    self._rows += 1
    if self._rows >= _ROWS and step - self._since >= _SHARE * self._steps:
      self._told = True
      what = 'none was used' if none else 'all were of one class'
      logging.say(
        f'{self._warning}the pseudo-labels have collapsed; from step '
        f'{self._since} to {step} {what}. See used_fraction, threshold '
        'and class_histogram in metrics.jsonl; a lower config.learning_rate, a '
        'lower threshold or more labels may help.'
      )
