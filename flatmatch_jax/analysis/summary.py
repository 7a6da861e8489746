"""The numbers of an analysis that one compares, in a table."""

from collections.abc import Callable

import numpy as np
from scipy import interpolate

_KINDS = ('labeled', 'unlabeled', 'held_out')
_RADIUS = 0.5  # Of the circle on which landscapes are compared.


def table(name: str, runs: dict[str, list[dict]]) -> str:
  """A row a number, a column a setting: mean ± deviation over its seeds."""
  found = {
    setting: [NUMBERS[name](data) for data in seeds]
    for setting, seeds in runs.items()
  }
  titles = dict.fromkeys(
    title for seeds in found.values() for row in seeds for title in row
  )
  rows = [[name, *found]]
  for title in titles:
    cells = [[row[title] for row in s if title in row] for s in found.values()]
    rows.append([title, *map(_spread, cells)])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(
    '  '.join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  )


def _spread(values: list[float]) -> str:
  """Three digits; the deviation is that of a sample, n − 1."""
  if not values:
    return '–'
  if len(values) == 1:
    return f'{values[0]:.3g}'
  return f'{np.mean(values):.3g} ± {np.std(values, ddof=1):.2g}'


def around(surface: np.ndarray, at: np.ndarray) -> float:
  """By how much the loss rises from the centre to a circle, in the mean."""
  angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
  circle = _RADIUS * np.stack([np.cos(angles), np.sin(angles)], -1)
  middle = len(at) // 2
  on_circle = interpolate.RegularGridInterpolator((at, at), surface)(circle)
  return float(on_circle.mean() - surface[middle, middle])


def _landscape(data):
  middle = len(data['at']) // 2
  found = {}
  for kind in _KINDS[:2]:
    surface = data[f'{kind}_surface']
    found[f'{kind} loss at the centre'] = surface[middle, middle]
  for kind in _KINDS[:2]:
    surface = data[f'{kind}_surface']
    title = f'{kind}, rise to the circle of share {_RADIUS}'
    found[title] = around(surface, data['at'])
  return found


def _sharpness(data):
  found = {
    f'{kind.replace("_", "-")}, at ρ = {data["rho"][-1]:g}': data[
      f'{kind}_rise'
    ][-1]
    for kind in ('labeled', 'cross', 'held_out')
    if f'{kind}_rise' in data
  }
  for key, title in (
    ('log_cross_sharpness', 'cross-sharpness, second half of training'),
    ('log_held_out_sharpness', 'held-out sharpness, second half of training'),
  ):
    if key in data:
      found[title] = _second_half(data, data[key])
  return found


def _second_half(data, values):
  return np.mean(values[data['log_step'] > data['log_step'][-1] / 2])


def _hessian(data):
  return {
    f'largest eigenvalue, {kind.replace("_", "-")}': data[
      f'{kind}_eigenvalues'
    ][0]
    for kind in _KINDS
    if f'{kind}_eigenvalues' in data
  }


def _gradients(data):
  found = {
    'angle at the checkpoint, °': np.mean(data['gradient_angle']),
    'norm of the total gradient there': np.mean(data['total_gradient_norm']),
  }
  if 'log_gradient_angle' in data:
    angle = data['log_gradient_angle']
    apart = data['log_unlabeled_loss'] - data['log_labeled_loss']
    norm = data['log_total_gradient_norm']
    found |= {
      'angle, second half of training, °': _second_half(data, angle),
      'probes with an angle above 90°, %': 100 * np.mean(angle > 90),
      'norm, second half of training': _second_half(data, norm),
      'unlabeled − labeled loss, second half': _second_half(data, apart),
    }
  return found


def _pseudo_labels(data):
  used, right = data['confusion'].sum(), np.trace(data['confusion'])
  found = {'used, % of the images': 100 * used / data['images'].sum()}
  if used:
    found['right, % of the used'] = 100 * right / used
  return found


def _convergence(data):
  found = {}
  if 'error_error' in data:
    found['last test error, %'] = data['error_error'][-1]
  if 'log_unlabeled_loss' in data:
    apart = data['log_unlabeled_loss'] - data['log_labeled_loss']
    title = 'unlabeled − labeled loss, second half'
    found[title] = _second_half(data, apart)
  return found


def _outcome(data):
  return {
    'last test error, %': data['error_last'],
    'best test error, %': data['error_best'],
    'time of a step, ms': 1000 * data['step_seconds'],
  }


NUMBERS: dict[str, Callable[[dict], dict[str, float]]] = {
  'landscape': _landscape,
  'sharpness': _sharpness,
  'hessian': _hessian,
  'gradients': _gradients,
  'pseudo_labels': _pseudo_labels,
  'convergence': _convergence,
  'sensitivity': _outcome,
  'efficiency': _outcome,
}
