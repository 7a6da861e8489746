"""Figures of what came out of runs: convergence, sensitivity, efficiency."""

import json

import numpy as np

from flatmatch_jax.analysis import canvas
from flatmatch_jax.run.settings import ALIKE, flatten

Runs = dict[str, list[dict]]


def convergence(runs: Runs):
  """Accuracy, both losses and their difference over steps."""
  figure, axes = canvas.make(1, 4, 3.6, 3.2)
  for number, seeds in enumerate(runs.values()):
    color = f'C{number}'
    tested = [data for data in seeds if 'error_error' in data]
    canvas.draw(
      axes[0, 0],
      [data['error_step'] for data in tested],
      [100 - data['error_error'] for data in tested],
      color=color,
    )
    logged = [data for data in seeds if 'log_unlabeled_loss' in data]
    steps = [data['log_step'] for data in logged]
    labeled = [data['log_labeled_loss'] for data in logged]
    unlabeled = [data['log_unlabeled_loss'] for data in logged]
    apart = [u - x for u, x in zip(unlabeled, labeled, strict=True)]
    for axis, values in zip(
      axes[0, 1:], (labeled, unlabeled, apart), strict=True
    ):
      canvas.draw(axis, steps, values, color=color)
  labels = (
    'test accuracy, %',
    'labeled loss at θ, nats',
    'unlabeled loss at θ, nats',
    'unlabeled − labeled loss, nats',
  )
  for axis, label in zip(axes[0], labels, strict=True):
    axis.set(xlabel='step', ylabel=label)
    axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def sensitivity(runs: Runs):
  """Test error over the one number in which the runs' configs differ.

  Mean and deviation of runs with the same number, such as those of other seeds;
  None if the configs differ in more, or in what is no number.
  """
  found = [data for seeds in runs.values() for data in seeds]
  configs = [flatten(json.loads(str(data['config']))) for data in found]
  fields = [
    field
    for field in configs[0]
    if len({str(config.get(field)) for config in configs}) > 1
    and field not in ('variant.labels', *ALIKE)
  ]
  if len(fields) != 1 or not all(
    isinstance(config.get(fields[0]), (int, float)) for config in configs
  ):
    return None
  numbers = np.array([config[fields[0]] for config in configs])
  at = np.unique(numbers)
  figure, axes = canvas.make(1, 1, 4.6, 3.4)
  for kind, style in (('last', 'o-'), ('best', 's--')):
    errors = np.array([float(data[f'error_{kind}']) for data in found])
    same = [errors[numbers == number] for number in at]
    means = [np.mean(values) for values in same]
    bars = [np.std(values, ddof=1) if len(values) > 1 else 0 for values in same]
    axes[0, 0].errorbar(at, means, bars, fmt=style, mfc='none', label=kind)
  axes[0, 0].set(
    xlabel=f'config.{fields[0]}', ylabel='test error, %', ylim=(0, None)
  )
  if at[0] > 0 and at[-1] / at[0] > 8:
    axes[0, 0].set_xscale('log')
    axes[0, 0].set_xticks(at, [f'{x:g}' for x in at], minor=False)
    axes[0, 0].set_xticks([], minor=True)
  axes[0, 0].grid(alpha=0.3)
  axes[0, 0].legend(frameon=False, fontsize='small')
  return figure


def efficiency(runs: Runs):
  """Milliseconds of a step against the test error, of each run a point."""
  figure, axes = canvas.make(1, 1, 5.2, 3.4)
  for number, (name, seeds) in enumerate(runs.items()):
    axes[0, 0].plot(
      [1000 * data['step_seconds'] for data in seeds],
      [data['error_last'] for data in seeds],
      'os^Dv*'[number % 6],
      label=canvas.with_seeds(name, seeds),
    )
  axes[0, 0].set(
    xlabel='time of a step, ms', ylabel='test error, %', xlim=(0, None)
  )
  axes[0, 0].set_ylim(bottom=0)
  axes[0, 0].grid(alpha=0.3)
  axes[0, 0].legend(frameon=False, fontsize='small')
  return figure
