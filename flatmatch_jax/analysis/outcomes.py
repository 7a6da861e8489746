"""Figures of what came out of runs: convergence, sensitivity, efficiency."""

import json

import numpy as np

from flatmatch_jax.analysis import canvas
from flatmatch_jax.workdir import ALIKE, flatten


def convergence(runs: dict[str, dict]):
  """Accuracy, both losses and their difference over steps."""
  figure, axes = canvas.make(1, 4, 3.6, 3.2)
  for number, data in enumerate(runs.values()):
    color = f'C{number}'
    if 'error_error' in data:
      accuracy = 100 - data['error_error']
      axes[0, 0].plot(data['error_step'], accuracy, color=color)
    if 'log_unlabeled_loss' not in data:
      continue
    unlabeled, labeled = data['log_unlabeled_loss'], data['log_labeled_loss']
    curves = labeled, unlabeled, unlabeled - labeled
    for axis, values in zip(axes[0, 1:], curves, strict=True):
      axis.plot(data['log_step'], values, color=color)
  labels = (
    'test accuracy, %',
    'labeled loss at θ',
    'unlabeled loss at θ',
    'unlabeled − labeled loss',
  )
  for axis, label in zip(axes[0], labels, strict=True):
    axis.set(xlabel='step', ylabel=label)
    axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def sensitivity(runs: dict[str, dict]):
  """Test error over the one number in which the runs' configs differ.

  Mean and deviation of runs with the same number, such as those of other seeds;
  None if the configs differ in more, or in what is no number.
  """
  configs = [flatten(json.loads(str(d['config']))) for d in runs.values()]
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
    errors = np.array([float(d[f'error_{kind}']) for d in runs.values()])
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


def efficiency(runs: dict[str, dict]):
  """Seconds a step took against the test error, of each run a point."""
  figure, axes = canvas.make(1, 1, 5.2, 3.4)
  for number, (name, data) in enumerate(runs.items()):
    axes[0, 0].plot(
      1000 * data['step_seconds'],
      data['error_last'],
      'os^Dv*'[number % 6],
      label=name,
    )
  axes[0, 0].set(
    xlabel='time of a step, ms', ylabel='test error, %', xlim=(0, None)
  )
  axes[0, 0].set_ylim(bottom=0)
  axes[0, 0].grid(alpha=0.3)
  axes[0, 0].legend(frameon=False, fontsize='small')
  return figure
