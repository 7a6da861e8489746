"""The figures of an analysis; each takes the data of one run or of several.

`runs` maps the name of a run to its arrays.
"""

import numpy as np

from flatmatch_jax.analysis import canvas, outcomes

_LEVELS = 24
_KINDS = {
  'labeled': ('labeled images', 'C0', '-'),
  'unlabeled': ('unlabeled images', 'C3', '--'),
  'held_out': ('held-out images', 'C2', ':'),
}
_TRAINED = ('labeled', 'unlabeled')


def landscape(runs: dict[str, dict]):
  """The paper's layout: a row a run, contours of both kinds and curves."""
  from matplotlib.colors import LogNorm

  figure, axes = canvas.make(len(runs), 3, 4.0, 3.4)
  low, high = _range(runs, 'surface')
  low = max(low, 1e-4)
  high = max(high, 2 * low)
  levels = np.geomspace(low, high, _LEVELS)
  _, top = _range(runs, 'curve')
  filled = None
  for row, (name, data) in zip(axes, runs.items(), strict=True):
    at = data['at']
    for axis, kind in zip(row, _TRAINED, strict=False):
      surface = np.clip(data[f'{kind}_surface'], low, high).T
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
      filled, ax=row[1], label='loss', format='%.2g', ticks=levels[::4]
    )
    for kind in _TRAINED:
      label, color, style = _KINDS[kind]
      row[2].plot(
        data['curve_at'], data[f'{kind}_curve'], style, color=color, label=label
      )
    row[2].set(
      title=f'{name}: loss curves',
      xlabel='share of the first direction',
      ylabel='loss',
      ylim=(0, 1.05 * top),
    )
    row[2].grid(alpha=0.3)
    row[2].legend(frameon=False, fontsize='small')
  return figure


def _range(runs, name):
  """The lowest and the highest finite loss of all runs."""
  values = [d[f'{k}_{name}'].ravel() for d in runs.values() for k in _TRAINED]
  finite = [x for x in np.concatenate(values) if np.isfinite(x)]
  return min(finite, default=0.0), max(finite, default=1.0)


def sharpness(runs: dict[str, dict]):
  """Over ρ at the checkpoint and, where the run was probed, over steps."""
  panels = {
    'labeled': 'sharpness, labeled loss',
    'cross': 'cross-sharpness, unlabeled loss',
    'held_out': 'sharpness, held-out loss',
  }
  logged = {
    'labeled': 'log_sharpness',
    'cross': 'log_cross_sharpness',
    'held_out': 'log_held_out_sharpness',
  }
  panels = {
    key: label
    for key, label in panels.items()
    if any(f'{key}_rise' in data for data in runs.values())
  }
  probed = any('log_step' in data for data in runs.values())
  figure, axes = canvas.make(1 + probed, len(panels), 4.4, 3.2)
  for column, (key, label) in enumerate(panels.items()):
    for number, data in enumerate(runs.values()):
      color = f'C{number}'
      if f'{key}_rise' in data:
        rise = data[f'{key}_rise']
        axes[0, column].plot(data['rho'], rise, '.-', color=color)
      if probed and logged[key] in data:
        axes[1, column].plot(data['log_step'], data[logged[key]], color=color)
    axes[0, column].set(
      title='at the checkpoint',
      xlabel='ρ, length of the perturbation',
      ylabel=label,
    )
    axes[0, column].grid(alpha=0.3)
    if probed:
      rho = {f'{d["log_rho"]:g}' for d in runs.values() if 'log_rho' in d}
      axes[1, column].set(
        title=f'along training, ρ = {", ".join(sorted(rho))}',
        xlabel='step',
        ylabel=label,
      )
      axes[1, column].grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def hessian(runs: dict[str, dict]):
  """The largest eigenvalues, with how far each may be off."""
  kinds = [
    kind
    for kind in _KINDS
    if any(f'{kind}_eigenvalues' in data for data in runs.values())
  ]
  figure, axes = canvas.make(1, len(kinds), 4.0, 3.2)
  for axis, kind in zip(axes[0], kinds, strict=True):
    for number, data in enumerate(runs.values()):
      if f'{kind}_eigenvalues' not in data:
        continue
      values = data[f'{kind}_eigenvalues']
      at = np.arange(1, len(values) + 1) + 0.12 * number
      errors = data[f'{kind}_errors']
      style = {'fmt': 'o', 'ms': 4, 'capsize': 3, 'color': f'C{number}'}
      axis.errorbar(at, values, errors, **style)
    axis.set(
      title=_KINDS[kind][0],
      xlabel='number of the eigenvalue',
      ylabel='eigenvalue of the Hessian',
    )
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def gradients(runs: dict[str, dict]):
  """Over steps, where the run was probed, and over batches at the end."""
  panels = {
    'gradient_angle': 'angle of labeled to total, °',
    'total_gradient_norm': 'norm of the total gradient',
    'difference': 'unlabeled loss − labeled loss',
  }
  with_difference = lambda data, prefix: (
    data
    | {
      f'{prefix}difference': data[f'{prefix}unlabeled_loss']
      - data[f'{prefix}labeled_loss']
    }
  )
  probed = any('log_step' in data for data in runs.values())
  figure, axes = canvas.make(1 + probed, len(panels), 4.4, 3.2)
  for number, data in enumerate(runs.values()):
    color = f'C{number}'
    data = with_difference(data, '')
    for axis, key in zip(axes[-1], panels, strict=True):
      spread = np.linspace(-0.2, 0.2, len(data[key]))
      axis.plot(number + spread, data[key], 'o', ms=4, color=color)
    if 'log_step' in data:
      data = with_difference(data, 'log_')
      for axis, key in zip(axes[0], panels, strict=True):
        axis.plot(data['log_step'], data[f'log_{key}'], color=color)
  for axis, label in zip(axes[-1], panels.values(), strict=True):
    axis.set(title='batches at the checkpoint', ylabel=label)
    axis.set_xticks([])
    axis.margins(x=0.3)
    axis.grid(alpha=0.3)
  if probed:
    for axis, label in zip(axes[0], panels.values(), strict=True):
      axis.set(title='along training', xlabel='step', ylabel=label)
      axis.grid(alpha=0.3)
  canvas.name_runs(figure, runs)
  return figure


def pseudo_labels(runs: dict[str, dict]):
  """A row a run: trust and accuracy of each class, and what is taken for it."""
  classes = max(len(data['images']) for data in runs.values())
  size = min(max(3.4, 0.3 * classes), 12.0)
  figure, axes = canvas.make(len(runs), 2, 1.3 * size, size)
  for (left, right), (name, data) in zip(axes, runs.items(), strict=True):
    at = np.arange(len(data['images']))
    left.bar(at - 0.2, 100 * data['used'], 0.4, label='used, % of the images')
    left.bar(at + 0.2, data['accuracy'], 0.4, label='right, % of the used')
    left.set(title=name, xlabel='true class', ylabel='percent', ylim=(0, 118))
    left.legend(frameon=False, fontsize='small', ncols=2, loc='upper center')
    confusion = data['confusion']
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1e-9)
    shown = right.imshow(share, cmap='viridis', vmin=0, vmax=100)
    right.set(title=name, xlabel='pseudo-label', ylabel='true class')
    figure.colorbar(shown, ax=right, label='% of the used of a class')
    if len(at) <= 30:
      names = [str(text) for text in data['class_names']]
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
