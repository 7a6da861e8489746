"""Figures of a run. matplotlib is imported where a figure is drawn."""

import pathlib

from flatmatch_jax.run.panels import IN_PICTURE, series
from flatmatch_jax.run.reference import Band
from flatmatch_jax.system import files


def make(rows: int, columns: int, width: float, height: float):
  """A figure, and its axes [rows, columns] of so many inches each."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  size = width * columns, height * rows
  figure = Figure(figsize=size, layout='constrained')
  FigureCanvasAgg(figure)  # No display, no global state.
  return figure, figure.subplots(rows, columns, squeeze=False)


def curves(
  rows: list[dict],
  title: str,
  path: pathlib.Path,
  bands: dict[int, Band] | None = None,
) -> None:
  """Errors, losses and pseudo-labels over steps, from metrics.jsonl's rows.

  `bands` are where earlier runs let expect the test error.
  """
  there = [
    panel
    for panel in IN_PICTURE
    if any(row.get(key) is not None for row in rows for key in panel.lines)
  ]
  there = there or [IN_PICTURE[0]]  # If no number was finite.
  figure, axes = make(1, len(there), 4.6, 3.4)
  for axis, panel in zip(axes[0], there, strict=True):
    for key, name in panel.lines.items():
      steps, values = series(rows, key)
      if any(value is not None for value in values):
        # A line of few points would hardly be seen, and of one not at all.
        few = '.' if len(rows) < 20 else ''
        axis.plot(steps, values, label=name, linewidth=1.4, marker=few)
    if bands and 'error' in panel.lines:
      low, high = zip(*((b.low, b.high) for b in bands.values()), strict=True)
      expected = {'label': 'expected by earlier runs', 'color': '0.85'}
      axis.fill_between(list(bands), low, high, **expected)
    axis.set(title=panel.title, xlabel='step', ylabel=panel.unit)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.grid(alpha=0.3)
    if axis.lines:
      axis.legend(frameon=False, fontsize='small')
  figure.suptitle(title)
  with files.replacing(path) as file:
    figure.savefig(file, format='png', dpi=110)


def comparison(runs: dict[str, list[list[dict]]], path: pathlib.Path) -> None:
  """Test error over steps, one line a method: its mean over seeds."""
  figure, ((axis,),) = make(1, 1, 6.6, 3.4)
  for number, (name, seeds) in enumerate(runs.items()):
    columns = [series(rows, 'error') for rows in seeds]
    steps = columns[0][0]
    errors = zip(*(values for _, values in columns), strict=True)
    mean = [sum(values) / len(seeds) for values in errors]
    color, style = f'C{number % 10}', '-' if number < 10 else '--'
    axis.plot(steps, mean, style, color=color, label=name, linewidth=1.6)
  # Where training ends is what counts; it begins at chance.
  ends = [line.get_ydata()[-1] for line in axis.lines]
  low, high = max(2 * min(ends) - max(ends), 0), 1.25 * max(ends)
  axis.set(xlabel='step', ylabel='test error, %', ylim=(low, high))
  axis.grid(alpha=0.3)
  figure.legend(frameon=False, fontsize='small', loc='outside right upper')
  with files.replacing(path) as file:
    figure.savefig(file, format='png', dpi=120)
