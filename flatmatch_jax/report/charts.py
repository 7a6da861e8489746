"""Charts as inline SVG: sharp at any size, coloured by the page's style.

A line knows its values, so that the page's script can show them; without the
script the picture is the same. All coordinates are in a box of WIDTH × HEIGHT.
"""

from collections.abc import Sequence
import json
import math
from typing import NamedTuple

import numpy as np

from flatmatch_jax.report.page import Html, card, tag
from flatmatch_jax.run.panels import SHARE

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 384, 26, 206  # Of the plot inside the box.
COLORS = 8  # In style.css; then the same, dashed.
POINTS = 400  # More are averaged.


class Line(NamedTuple):
  """Values over steps; None breaks the line."""

  name: str
  x: Sequence[float]
  y: Sequence[float | None]
  low: Sequence[float] | None = None  # A band around it.
  high: Sequence[float] | None = None
  color: int = 0  # By its place among all lines, drawn or not.


def number(value: float | None) -> str:
  """Four digits that count, without an exponent where that can be."""
  if value is None:
    return '–'
  if value == 0 or 1e-3 <= abs(value) < 1e6:
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    text = f'{value:,.{min(max(digits, 0), 6)}f}'
    return text.rstrip('0').rstrip('.') if '.' in text else text
  return f'{value:.3g}'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """About `count` round numbers from `low` to `high`, both inside."""
  span = high - low or 1.0
  step = 10.0 ** math.floor(math.log10(span / count))
  step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (m * step) <= count)
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def _short(value):
  for limit, letter in ((1e6, 'M'), (1e4, 'k')):
    if abs(value) >= limit:
      return f'{value / limit * (10 if letter == "k" else 1):g}{letter}'
  return number(value)


def thin(line: Line) -> Line:
  """At most POINTS of a line: means of neighbours."""
  size = math.ceil(len(line.x) / POINTS)
  if size <= 1:
    return line
  starts = range(0, len(line.x), size)

  def means(values):
    if values is None:
      return None
    parts = [values[i : i + size] for i in starts]
    known = [[v for v in part if v is not None] for part in parts]
    return [sum(part) / len(part) if part else None for part in known]

  x = [line.x[min(i + size, len(line.x)) - 1] for i in starts]
  y, low, high = map(means, (line.y, line.low, line.high))
  return Line(line.name, x, y, low, high, line.color)


class _Scale(NamedTuple):
  """From values to places along an axis."""

  low: float
  high: float
  start: float
  end: float

  def __call__(self, value) -> float:
    share = (value - self.low) / (self.high - self.low or 1.0)
    return round(self.start + share * (self.end - self.start), 1)


def _top(lines, until):
  """The highest value to show, and whether some begin above it.

  The first tenth of a run, where errors are many times what they come to,
  would leave no room for the rest.
  """
  values = [v for line in lines for v in line.high or line.y if v is not None]
  late = [
    v
    for line in lines
    for x, v in zip(line.x, line.high or line.y, strict=True)
    if v is not None and x >= until / 10
  ]
  highest, settled = max(values), max(late, default=max(values))
  cut = highest > 1.5 * settled > 0
  return (1.05 * settled if cut else highest), cut


def curves(title: str, lines: list[Line], unit: str, key: bool = True) -> Html:
  """Lines over steps from zero on; '' if none of them has a value.

  Without a `key` their names have to stand beside.
  """
  lines = [
    line._replace(color=i)
    for i, line in enumerate(lines)
    if any(v is not None for v in line.y)
  ]
  if not lines:
    return Html('')
  note = ''
  if max(len(line.x) for line in lines) > POINTS:
    lines, note = [thin(line) for line in lines], 'Points are means.'
  until = max(line.x[-1] for line in lines)
  highest, cut = (105.0, False) if unit == SHARE else _top(lines, until)
  lowest = min(0.0, *(v for line in lines for v in line.y if v is not None))
  if highest <= lowest:
    highest = lowest + 1.0
  across = _Scale(0, until, LEFT, RIGHT)
  up = _Scale(lowest, highest, BOTTOM, TOP)
  if cut:
    note += ' Higher values at the start lie outside.'
  drawn = [_draw(line, across, up) for line in lines]
  values = [
    {
      'name': line.name,
      'style': style_of(line.color),
      'x': line.x,
      'y': [_rounded(v) for v in line.y],
    }
    for line in lines
  ]
  picture = tag(
    'svg',
    _axes(across, up, unit),
    _window(drawn),
    viewBox=f'0 0 {WIDTH} {HEIGHT}',
    role='img',
    aria_label=f'{title}, {unit}, over steps. ' + ' '.join(map(_tell, lines)),
    data_lines=json.dumps(values),
    data_until=until,
  )
  return card(
    title, legend(lines) if key and len(lines) > 1 else None, picture, note=note
  )


def _rounded(value):
  return value if value is None else float(f'{value:.4g}')


def _tell(line):
  known = [v for v in line.y if v is not None]
  return (
    f'{line.name}: from {number(known[0])} to {number(known[-1])}, '
    f'lowest {number(min(known))}.'
  )


def style_of(color: int) -> str:
  """The class of a line and of its mark in the legend."""
  return f'c{color % COLORS}' + (' dashed' if color // COLORS % 2 else '')


def legend(lines: list[Line]) -> Html:
  """The names of lines beside their colours."""
  items = [
    tag('li', tag('i', class_=style_of(line.color)), line.name)
    for line in lines
  ]
  return tag('ul', *items, class_='legend')


def _draw(line, across, up):
  place = lambda x, y: f'{across(x)},{up(y)}'
  parts: list[list[str]] = [[]]
  for x, y in zip(line.x, line.y, strict=True):
    if y is None:
      parts.append([])
    else:
      parts[-1].append(place(x, y))
  band = ''
  if line.low is not None and line.high is not None:
    there = list(map(place, line.x, line.high))
    back = list(map(place, line.x, line.low))[::-1]
    band = tag('polygon', points=' '.join(there + back), class_='band')
  shapes = []
  for part in filter(None, parts):
    if len(part) == 1:
      x, y = part[0].split(',')
      shapes.append(tag('circle', cx=x, cy=y, r=2.5))
    else:
      shapes.append(tag('polyline', points=' '.join(part)))
  return tag('g', band, *shapes, class_=style_of(line.color))


def _window(shapes):
  """What leaves the plot is not seen: an inner svg cuts it off."""
  x, y, width, height = LEFT - 3, TOP - 3, RIGHT - LEFT + 6, BOTTOM - TOP + 6
  return tag(
    'svg', *shapes, x=x, y=y, width=width, height=height,
    viewBox=f'{x} {y} {width} {height}', class_='lines',
  )  # fmt: skip


def _axes(across, up, unit):
  parts = [text(unit, 2, 11, 'start')]
  for value in ticks(up.low, up.high, 4):
    y = up(value)
    parts.append(tag('line', x1=LEFT, x2=RIGHT, y1=y, y2=y))
    parts.append(text(_short(value), LEFT - 6, y + 4, 'end'))
  for value in ticks(across.low, across.high, 5):
    parts.append(text(_short(value), across(value), BOTTOM + 16, 'middle'))
  parts.append(text('step', (LEFT + RIGHT) / 2, HEIGHT - 4, 'middle'))
  return tag('g', *parts, class_='axes', aria_hidden='true')


def text(content, x, y, class_) -> Html:
  return tag('text', content, x=x, y=y, class_=class_)


def reliability(bins: dict[str, np.ndarray], error: float) -> Html:
  """Accuracy against confidence; below, how many images are that confident."""
  count, edges = len(bins['share']), np.linspace(0, 1, len(bins['share']) + 1)
  across = _Scale(0, 1, LEFT, RIGHT)
  up, share = _Scale(0, 100, 168, TOP), _Scale(0, 100, 226, 186)
  shapes = []
  for scale, values in ((up, (0, 50, 100)), (share, (0, 100))):
    for value in values:
      y = scale(value)
      shapes.append(tag('line', x1=LEFT, x2=RIGHT, y1=y, y2=y, class_='rule'))
      shapes.append(text(value, LEFT - 6, y + 4, 'end'))
  for i in range(count):
    x, width = across(edges[i]) + 1, across(edges[1]) - LEFT - 2
    box = lambda scale, value, kind, x=x, width=width: tag(
      'rect', x=x, y=scale(value), width=round(width, 1),
      height=round(scale(0) - scale(value), 1), class_=kind,
    )  # fmt: skip
    part = 100 * float(bins['share'][i])
    if part:
      accuracy = 100 * float(bins['accuracy'][i])
      few = ' few' if part < 2 else ''  # Hardly more than chance.
      shapes.append(box(up, accuracy, f'bar c0{few}'))
    shapes.append(box(share, part, 'bar count'))
  for place in (0, 0.25, 0.5, 0.75, 1):
    shapes.append(text(f'{place:g}', across(place), 241, 'middle'))
  ideal = tag('line', x1=LEFT, y1=up(0), x2=RIGHT, y2=up(100), class_='ideal')
  told = ', '.join(
    f'at confidence {bins["confidence"][i]:.2f} {bins["accuracy"][i]:.0%} '
    f'right ({bins["share"][i]:.0%} of the images)'
    for i in range(count)
    if bins['share'][i]
  )
  picture = tag(
    'svg',
    *shapes,
    ideal,
    text('accuracy, %', 2, 11, 'start'),
    text('share of the images, %', LEFT + 4, 184, 'start'),
    text('confidence', (LEFT + RIGHT) / 2, 256, 'middle'),
    viewBox=f'0 0 {WIDTH} 260',
    role='img',
    class_='axes',
    aria_label=f'Accuracy by confidence: {told}.',
  )
  note = f'Calibration error {error:.2f}%. On the dashed '
  note += 'line it would be 0; bins of fewer than 2% of the images are pale.'
  return card('Calibration', picture, note=note)
