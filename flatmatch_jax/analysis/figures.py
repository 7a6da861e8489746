"""The figures of an analysis; each takes the data of one run or of several.

`runs` maps the name of a run to its arrays. matplotlib is imported where a
figure is drawn.
"""

import pathlib

import numpy as np

from flatmatch_jax import files

_LEVELS = 24
_KINDS = {
  'labeled': ('labeled images', 'C0', '-'),
  'unlabeled': ('unlabeled images', 'C3', '--'),
  'held_out': ('held-out images', 'C2', ':'),
}


def _figure(rows: int, columns: int, width: float = 4.2, height: float = 3.4):
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(
    figsize=(width * columns, height * rows), layout='constrained'
  )
  FigureCanvasAgg(figure)  # No display, no global state.
  return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure, path: pathlib.Path) -> None:
  """As path.png and path.svg, each whole or not at all."""
  for kind in ('png', 'svg'):
    with files.replacing(path.with_suffix(f'.{kind}')) as file:
      figure.savefig(file, format=kind, dpi=110)


def landscape(runs: dict[str, dict]):
  """The paper's layout: a row a run, contours of both kinds and curves."""
  from matplotlib.colors import LogNorm

  figure, axes = _figure(len(runs), 3, 4.0, 3.4)
  values = np.concatenate(
    [d[f'{k}_surface'].ravel() for d in runs.values() for k in _TRAINED]
  )
  low = max(np.nanmin(values), 1e-4)
  high = max(np.nanmax(values), 2 * low)
  levels = np.geomspace(low, high, _LEVELS)
  top = max(d[f'{k}_curve'].max() for d in runs.values() for k in _TRAINED)
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
    _finish(row[2])
  return figure


_TRAINED = ('labeled', 'unlabeled')


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
  figure, axes = _figure(1 + probed, len(panels), 4.4, 3.2)
  for column, (key, label) in enumerate(panels.items()):
    for name, data in runs.items():
      if f'{key}_rise' in data:
        axes[0, column].plot(data['rho'], data[f'{key}_rise'], '.-', label=name)
      if probed and logged[key] in data:
        axes[1, column].plot(data['log_step'], data[logged[key]], label=name)
    axes[0, column].set(xlabel='ρ, length of the perturbation', ylabel=label)
    _finish(axes[0, column])
    if probed:
      rho = ', '.join(
        sorted({f'{d["log_rho"]:g}' for d in runs.values() if 'log_rho' in d})
      )
      axes[1, column].set(xlabel='step', ylabel=f'{label}, ρ = {rho}')
      _finish(axes[1, column])
  return figure


def _finish(axis):
  axis.grid(alpha=0.3)
  if axis.lines:
    axis.legend(frameon=False, fontsize='small')


FIGURES = {'landscape': landscape, 'sharpness': sharpness}
