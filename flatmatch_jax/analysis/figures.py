"""The figures of an analysis; each takes the data of one run or of several.

`runs` maps a setting's name to the arrays of its runs, which differ in seeds:
lines are means over them, bands reach from the lowest to the highest.
"""

import numpy as np

from flatmatch_jax.analysis import canvas, outcomes
from flatmatch_jax.analysis.outcomes import Runs

_LEVELS = 24
_KINDS = {
  'labeled': ('labeled images', 'C0', '-'),
  'unlabeled': ('unlabeled images', 'C3', '--'),
  'held_out': ('held-out images', 'C2', ':'),
}
_TRAINED = ('labeled', 'unlabeled')


def landscape(runs: Runs):
  """The paper's layout: a row a setting, contours of both kinds and curves.

  Contours are of the mean over seeds, whose weights, and so the directions,
  are others.
  """
  from matplotlib.colors import LogNorm

  figure, axes = canvas.make(len(runs), 3, 4.0, 3.4)
  low, high = _range(runs, 'surface')
  low = max(low, 1e-4)
  high = max(high, 2 * low)
  levels = np.geomspace(low, high, _LEVELS)
  _, top = _range(runs, 'curve')
  filled = None
  for row, (name, seeds) in zip(axes, runs.items(), strict=True):
    name = canvas.with_seeds(name, seeds)
    at = seeds[0]['at']
    for axis, kind in zip(row, _TRAINED, strict=False):
      mean = np.mean([data[f'{kind}_surface'] for data in seeds], 0)
      surface = np.clip(mean, low, high).T
      options = {'levels': levels, 'norm': LogNorm(low, high)}
      filled = axis.contourf(at, at, surface, cmap='viridis', **options)
      lines = axis.contour(
        at, at, surface, colors='white', linewidths=0.5, **options
      )
      axis.clabel(lines, lines.levels[::4], fontsize=6, fmt='%.2g')
      axis.plot(0, 0, 'w+')
      axis.set(
        title=f'{name}: {_KINDS[kind][0]}',
        xlabel='share of the first direction',
        ylabel='share of the second',
        aspect='equal',
      )
    figure.colorbar(
      filled,
      ax=row[1],
      label='loss, nats',
      format='%.2g',
      ticks=levels[::4],
    )
    for kind in _TRAINED:
      label, color, style = _KINDS[kind]
      curves = [data[f'{kind}_curve'] for data in seeds]
      places = [data['curve_at'] for data in seeds]
      canvas.draw(row[2], places, curves, style, color=color, label=label)
    row[2].set(
      title=f'{name}: loss curves',
      xlabel='share of the first direction',
      ylabel='loss, nats',
      ylim=(0, 1.05 * top),
    )
    row[2].grid(alpha=0.3)
    row[2].legend(frameon=False, fontsize='small')
  return figure


def _range(runs, name):
  """The lowest and the highest finite loss of all runs."""
  values = [
    data[f'{kind}_{name}'].ravel()
    for seeds in runs.values()
    for data in seeds
    for kind in _TRAINED
  ]
  finite = [x for x in np.concatenate(values) if np.isfinite(x)]
  return min(finite, default=0.0), max(finite, default=1.0)


def _has(runs, key):
  return any(key in data for seeds in runs.values() for data in seeds)


def _draw(axis, runs, at, key, style='-'):
  """A line a setting, of the seeds that have the numbers `key`."""
  for number, seeds in enumerate(runs.values()):
    there = [data for data in seeds if key in data]
    canvas.draw(
      axis,
      [data[at] for data in there],
      [data[key] for data in there],
      style,
      color=f'C{number}',
    )


def sharpness(runs: Runs):
  """Over ρ at the checkpoint and, where the run was probed, over steps."""
  panels = {
    'labeled': ('sharpness, labeled loss', 'log_sharpness'),
    'cross': ('cross-sharpness', 'log_cross_sharpness'),
    'held_out': ('sharpness, held-out loss', 'log_held_out_sharpness'),
  }
  panels = {k: v for k, v in panels.items() if _has(runs, f'{k}_rise')}
  probed = _has(runs, 'log_step')
  rhos = {
    f'{data["log_rho"]:g}'
    for seeds in runs.values()
    for data in seeds
    if 'log_rho' in data
  }
  figure, axes = canvas.make(1 + probed, len(panels), 4.4, 3.2)
  for column, (key, (label, logged)) in enumerate(panels.items()):
    above = axes[0, column]
    _draw(above, runs, 'rho', f'{key}_rise', '.-')
    above.set(
      title='at the checkpoint',
      xlabel='ρ, length of the perturbation',
      ylabel=f'{label}, nats',
    )
    above.grid(alpha=0.3)
    if probed:
      below = axes[1, column]
      _draw(below, runs, 'log_step', logged)
      below.set(
        title=f'along training, ρ = {", ".join(sorted(rhos))}',
        xlabel='step',
        ylabel=f'{label}, nats',
      )
      below.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def hessian(runs: Runs):
  """The largest eigenvalues of each seed, with how far each may be off."""
  kinds = [kind for kind in _KINDS if _has(runs, f'{kind}_eigenvalues')]
  figure, axes = canvas.make(1, len(kinds), 4.0, 3.2)
  for axis, kind in zip(axes[0], kinds, strict=True):
    for number, seeds in enumerate(runs.values()):
      for seed, data in enumerate(seeds):
        if f'{kind}_eigenvalues' not in data:
          continue
        values = data[f'{kind}_eigenvalues']
        beside = (number + (seed + 1) / (len(seeds) + 1)) / len(runs) - 0.5
        at = np.arange(1, len(values) + 1) + 0.7 * beside
        style = {'fmt': 'o', 'ms': 3, 'capsize': 2, 'color': f'C{number}'}
        axis.errorbar(at, values, data[f'{kind}_errors'], **style)
    axis.set(
      title=_KINDS[kind][0],
      xlabel='number of the eigenvalue',
      ylabel='eigenvalue of the Hessian',
    )
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def gradients(runs: Runs):
  """Over steps, where the run was probed, and over batches at the end."""
  panels = {
    'gradient_angle': 'angle of labeled to total, °',
    'total_gradient_norm': 'norm of the total gradient',
    'difference': 'unlabeled loss − labeled loss, nats',
  }
  runs = {
    name: [_with_difference(data) for data in seeds]
    for name, seeds in runs.items()
  }
  probed = _has(runs, 'log_step')
  figure, axes = canvas.make(1 + probed, len(panels), 4.4, 3.2)
  for axis, (key, label) in zip(axes[-1], panels.items(), strict=True):
    for number, seeds in enumerate(runs.values()):
      values = np.concatenate([data[key] for data in seeds])
      at = number + np.linspace(-0.3, 0.3, len(values))
      axis.plot(at, values, 'o', ms=3, color=f'C{number}')
    axis.set(title='batches at the checkpoint', ylabel=label)
    axis.set_xticks([])
    axis.margins(x=0.3)
    axis.grid(alpha=0.3)
  for axis, (key, label) in zip(axes[0], panels.items(), strict=True):
    if probed:
      _draw(axis, runs, 'log_step', f'log_{key}')
      axis.set(title='along training', xlabel='step', ylabel=label)
      axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def _with_difference(data):
  """Adds by how much the unlabeled loss is above the labeled one."""
  return data | {
    f'{prefix}difference': data[f'{prefix}unlabeled_loss']
    - data[f'{prefix}labeled_loss']
    for prefix in ('', 'log_')
    if f'{prefix}unlabeled_loss' in data
  }


def pseudo_labels(runs: Runs):
  """A row a setting: trust and accuracy of each class, and what it is taken
  for, of the images of all seeds."""
  classes = max(len(seeds[0]['images']) for seeds in runs.values())
  size = min(max(3.4, 0.3 * classes), 12.0)
  figure, axes = canvas.make(len(runs), 2, 1.3 * size, size)
  for (left, right), (name, seeds) in zip(axes, runs.items(), strict=True):
    title = canvas.with_seeds(name, seeds)
    at = np.arange(len(seeds[0]['images']))
    confusion = np.sum([data['confusion'] for data in seeds], 0)
    images = np.sum([data['images'] for data in seeds], 0)
    trusted = confusion.sum(1)
    used = 100 * trusted / np.maximum(images, 1)
    right_ones = 100 * np.diagonal(confusion) / np.maximum(trusted, 1e-9)
    left.bar(at - 0.2, used, 0.4, label='used, % of the images')
    left.bar(at + 0.2, right_ones, 0.4, label='right, % of the used')
    left.set(title=title, xlabel='true class', ylabel='percent', ylim=(0, 118))
    left.legend(frameon=False, fontsize='small', ncols=2, loc='upper center')
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1e-9)
    shown = right.imshow(share, cmap='viridis', vmin=0, vmax=100)
    right.set(title=title, xlabel='pseudo-label', ylabel='true class')
    figure.colorbar(shown, ax=right, label='% of the used of a class')
    if len(at) <= 30:
      names = [str(text) for text in seeds[0]['class_names']]
      turned = {'rotation': 90} if max(map(len, names)) > 2 else {}
      left.set_xticks(at, names, **turned)
      right.set_xticks(at, names, **turned)
      right.set_yticks(at, names)
  return figure


FIGURES = {
  'landscape': landscape,
  'sharpness': sharpness,
  'hessian': hessian,
  'gradients': gradients,
  'pseudo_labels': pseudo_labels,
  'convergence': outcomes.convergence,
  'sensitivity': outcomes.sensitivity,
  'efficiency': outcomes.efficiency,
}
