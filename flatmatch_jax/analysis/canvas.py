"""What all figures share. matplotlib is imported where one is drawn."""

from collections.abc import Sequence
import pathlib

import numpy as np

from flatmatch_jax.run.plots import make
from flatmatch_jax.system import files

__all__ = ['draw', 'make', 'name_runs', 'save', 'with_seeds']


def save(figure, path: pathlib.Path) -> None:
  """As path.png and path.svg, each whole or not at all."""
  for kind in ('png', 'svg'):
    with files.replacing(path.with_suffix(f'.{kind}')) as file:
      figure.savefig(file, format=kind, dpi=110)


def draw(axis, at: Sequence, values: Sequence, style: str = '-', **options):
  """A line through the means over seeds, in a band of all of them.

  `at` and `values` have an array a seed. Where seeds were not measured at the
  same places each has a line of its own.
  """
  if not values:
    return
  if any(not np.array_equal(places, at[0]) for places in at):
    for places, numbers in zip(at, values, strict=True):
      axis.plot(places, numbers, style, **options)
      options.pop('label', None)
    return
  (line,) = axis.plot(at[0], np.mean(values, 0), style, **options)
  if len(values) > 1:
    low, high = np.min(values, 0), np.max(values, 0)
    band = {'color': line.get_color(), 'alpha': 0.2, 'linewidth': 0}
    axis.fill_between(at[0], low, high, **band)


def name_runs(figure, runs) -> None:
  """One legend for all axes, whose colours are in the order of the runs."""
  from matplotlib.lines import Line2D

  lines = [Line2D([], [], color=f'C{number}') for number in range(len(runs))]
  names = [with_seeds(name, seeds) for name, seeds in runs.items()]
  columns = min(4, len(names))
  figure.legend(
    lines, names, loc='outside lower center', ncols=columns, frameon=False
  )


def with_seeds(name: str, seeds: list) -> str:
  return f'{name}, {len(seeds)} seeds' if len(seeds) > 1 else name
