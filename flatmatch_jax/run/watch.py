"""Warns when the numbers of a run go wrong."""

from collections.abc import Callable
import copy
import math
import statistics
from typing import Any

import jax
import numpy as np

from flatmatch_jax.step.train_step import MUST_BE_FINITE
from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError

_LOOKS = 20  # At steps of a block, whose means are judged.
_WATCHED = (
  'labeled_loss',
  'unlabeled_loss',
  'worst_loss',
  'largest_class',
  'used_fraction',
)
# Blocks in a row without pseudo-labels. Thresholds that nothing passes at first
# are usual.
_UNUSED = 5
# The largest class may have this part of the way from its expected share to
# all pseudo-labels: the user's own unlabeled images may be unbalanced.
_ONE_CLASS = 0.85
# What a class that is missing from a batch adds to FreeMatch's fairness term.
_MISSING = math.log(1e-12)


class NotFiniteError(UserError):
  """Too many steps in a row had numbers that are not finite."""


class Watch:
  """Looks at steps and rows of a run.

  More than `config.max_skipped` skipped steps in a row end it. Losses and
  pseudo-labels are judged by their means over blocks of 1% of the steps, in
  short runs of at least 20 steps. Each warning is given once.
  """

  def __init__(
    self, config, shares: np.ndarray, name: str = '', state: Any = None
  ):
    """Starts to look, or continues from the `state()` of an earlier start.

    `shares` are those of the labels in each class; `name` is the run's, for its
    warnings, if there are several.
    """
    self._config, self._shares = config, shares
    self._warning = f'Warning: {name}: ' if name else 'Warning: '
    self._skipped = 0
    self._looked = 0  # The last step.
    steps = config.steps
    block = max(_LOOKS, min(steps // 20, 100), steps // 100)
    self._every = block // _LOOKS
    # Before it has learned anything, a network may guess one class only: for
    # 80 steps with FreeMatch on CIFAR-10.
    self._settled = min(100, steps // 5) + _LOOKS * self._every
    self._state: dict[str, Any] = state or {
      'looks': 0,
      'block': {},  # Values of this block by name.
      'lowest': {},  # Means of the blocks before.
      'unused': 0,  # Blocks in a row.
      'warnings': {},  # Texts by rule.
    }

  def state(self) -> dict[str, Any]:
    """What the next start of the run needs to know, for JSON."""
    return copy.deepcopy(self._state)

  @property
  def warnings(self) -> list[str]:
    return list(self._state['warnings'].values())

  def looks_at(self, step: int) -> bool:
    """Whether `step` is one of those that are judged."""
    return step % self._every == 0

  def step(
    self, step: int, metrics, last_saved: Callable[[], int | None]
  ) -> None:
    """Warns of losses and pseudo-labels that go wrong.

    Raises NotFiniteError after too many steps that were not finite.
    `last_saved` gives the step of the last checkpoint.
    """
    self.look(step, metrics)
    number = int(metrics['skipped_in_a_row'])
    if number <= self._config.max_skipped:
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
      f'and config.max_skipped={self._config.max_skipped}: the run stops; '
      f'{kept}. Start in another --workdir with a lower config.learning_rate, '
      'or with config.dtype=float32 if it was bfloat16.'
    )

  def look(self, step: int, metrics) -> None:
    """Judges a step once; to be called before `state()` is saved."""
    if self.looks_at(step) and step != self._looked:
      self._looked = step
      self._look(step, metrics)

  def row(self, step: int, row: dict) -> None:
    """Warns of what a row of the log shows."""
    if (skipped := int(row['skipped_steps'])) > self._skipped:
      self._skipped = skipped
      messages.say(
        f'{self._warning}{skipped} of {step} steps were skipped, because a '
        'loss or the gradient was not finite.'
      )

  def _look(self, step, metrics):
    """Adds a step to its block, and judges the block if it is complete."""
    state = self._state
    found = jax.device_get({k: metrics[k] for k in _WATCHED if k in metrics})
    for name, value in found.items():
      if math.isfinite(value):  # Others are skipped steps.
        state['block'].setdefault(name, []).append(float(value))
    state['looks'] += 1
    if state['looks'] % _LOOKS:
      return
    means = {k: statistics.fmean(v) for k, v in state['block'].items()}
    if state['looks'] > _LOOKS and step > self._config.warmup_steps:
      found = dict(self._judge(step, means))
      old = state['warnings']
      self._warn(step, {k: v for k, v in found.items() if k not in old})
    for name, mean in means.items():
      state['lowest'][name] = min(mean, state['lowest'].get(name, mean))
    state['block'] = {}

  def _judge(self, step, means):
    """Yields what is wrong with the means of a block: a rule and a text."""
    args = self._config.method_args
    used = means.get('used_fraction')
    unused = used == 0 and step > args.get('warmup_steps', 0)
    self._state['unused'] = self._state['unused'] + 1 if unused else 0
    if self._state['unused'] >= _UNUSED:
      steps = _UNUSED * _LOOKS * self._every
      yield 'unused', f'no pseudo-label was used for {steps:,} steps'
    expected = self._shares.max()
    largest = means.get('largest_class', 0.0)
    limit = expected + _ONE_CLASS * (1 - expected)
    if largest > limit and step >= self._settled:
      yield (
        'largest_class',
        f'{largest:.0%} of the pseudo-labels are of one class, and at most '
        f'{expected:.0%} of the labels',
      )
    chance = math.log(len(self._shares))
    if 'labeled_loss' in means:
      yield from self._judge_loss('labeled_loss', means, chance)
    if used is None:  # The scale of other unlabeled losses is not known.
      return
    chance *= max([1.0, *(v for k, v in args.items() if k.endswith('weight'))])
    for name in ('unlabeled_loss', 'worst_loss'):
      if name not in means:
        continue
      yield from self._judge_loss(name, means, chance)
      if means[name] < self._least_fairness() and step >= self._settled:
        yield (
          name,
          f'the mean {name} is {means[name]:.3g}, which the fairness term '
          'reaches if most classes are missing from the guesses',
        )

  def _judge_loss(self, name, means, chance):
    mean = means[name]
    lowest = self._state['lowest'].get(name, mean)
    falls = mean < lowest  # A network may start with large logits.
    if (mean > 1.5 * chance and not falls) or mean > chance > 2 * lowest:
      yield (
        name,
        f'the mean {name} is {mean:.3g}, above the {chance:.3g} of random '
        f'guesses (lowest so far: {lowest:.3g})',
      )

  def _least_fairness(self) -> float:
    """FreeMatch's fairness term if half of the classes are missing.

    Classes that a batch lacks by chance are not counted.
    """
    by_chance = np.mean((1 - self._shares) ** self._config.unlabeled_batch_size)
    value = _MISSING * (1 + by_chance) / 2 - math.log(len(self._shares))
    weight = self._config.method_args.get('fairness_weight', 0.0)
    return weight * value if weight else -math.inf

  def _warn(self, step, found: dict[str, str]):
    """Prints what was `found` and what may help, and remembers it."""
    if not found:
      return
    for rule, text in found.items():
      self._state['warnings'][rule] = f'step {step}: {text}'
    messages.say(
      f'{self._warning}the run may be collapsing. At step {step} '
      f'{"; ".join(found.values())}. '
      + remedies(self._config, 'unused' in found)
    )


def remedies(config, unused: bool) -> str:
  """What may help a run of `config`, a dict, that may be collapsing."""
  args = config['method_args']
  changes = f'a lower config.learning_rate (now {config["learning_rate"]:g})'
  if unused:
    changes += ', a lower threshold'
  if 'fairness_weight' in args:  # FreeMatch, alone or under a recipe.
    changes += (
      ', a lower config.method_args.fairness_weight (now '
      f'{args["fairness_weight"]:g}), --config.method_args.warmup_steps='
      f'{max(1, config["steps"] // 10)} to train on labeled images alone at '
      'first'
    )
  return (
    f'Start in another --workdir with {changes}, or more labels; '
    'method=supervised shows what the labels alone achieve.'
  )


def class_shares(labels, split, classes: int) -> np.ndarray:
  """Shares of the labels in each class, or of the true ones if more extreme.

  True labels of unlabeled images are -1 if they are not known.
  """
  found = []
  for index in (split.labeled, split.unlabeled):
    known = labels[index]
    counts = np.bincount(known[known >= 0], minlength=classes)
    found.append(counts / max(1, counts.sum()))
  return max(found, key=np.max)
