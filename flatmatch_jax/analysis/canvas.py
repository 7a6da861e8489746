"""What all figures share. matplotlib is imported where one is drawn."""

import pathlib

from flatmatch_jax import files


def make(rows: int, columns: int, width: float, height: float):
  """A figure, and its axes [rows, columns] of so many inches each."""
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


def name_runs(figure, runs) -> None:
  """One legend for all axes, whose colours are in the order of the runs."""
  from matplotlib.lines import Line2D

  lines = [Line2D([], [], color=f'C{number}') for number in range(len(runs))]
  figure.legend(lines, runs, loc='outside lower center', ncols=5, frameon=False)
