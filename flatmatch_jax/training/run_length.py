"""Shortens what papers chose for a million steps to the length of a run.

An average with a decay of 0.999 covers the last 1,000 steps. In a run of 400
it would end with much of what it started from. So a field of the config may
follow `config.steps`: it has the paper's number in a long run, a smaller one in
a short run, and whatever you set it to once you do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections

_DECAYS = ('bn_momentum', 'ema_decay', 'decay', 'feedback_decay')
_INTERVALS = ('eval_every', 'checkpoint_every')
_WINDOW = 20  # An average covers at most a twentieth of the run.
# Counts of steps are at most one part in so many of the run.
_PARTS = {
  'warmup_steps': 20,
  'interval': 40,
  'uda_warmup_steps': 8,
  'pretrain_steps': 4,
}


def decay(paper: float, steps: int) -> float:
  """The paper's decay, or the one whose window is a twentieth of `steps`.

  The window, 1 / (1 - decay), is at least two steps.
  """
  window = max(steps / _WINDOW, 2)
  return paper if 1 / (1 - paper) <= window else 1 - 1 / window


def count(paper: int, steps: int, parts: int) -> int:
  """The paper's number of steps, or one part in `parts` of the run.

  At least one, unless the run has only one step.
  """
  return min(paper, max(steps // parts, min(1, steps - 1)))


def interval(usual: int, steps: int) -> int:
  """The usual number of steps, or a quarter of the run, rounded up."""
  return min(usual, -(-steps // 4))


def follow(config, group, **papers: float) -> None:
  """Makes fields of `group`, a part of `config`, follow `config.steps`.

  `papers` are the fields with the papers' numbers. Other names are left alone.
  """
  for name, paper in papers.items():
    op = None
    if name in _DECAYS:
      op = _Op(decay, (config.get_ref('steps'),))
    elif name in _PARTS:
      op = _Op(count, (config.get_ref('steps'), _PARTS[name]))
    elif name in _INTERVALS:
      op = _Op(interval, (config.get_ref('steps'),))
    if op:
      group[name] = ml_collections.FieldReference(paper, op=op)


class _Op(NamedTuple):
  """What a FieldReference computes: fn(value, *args)."""

  fn: Any
  args: Sequence[Any]
