"""How the cost of a step grows, by XLA's FLOPs and bytes accessed.

  export XLA_FLAGS='--xla_backend_optimization_level=0
      --xla_cpu_use_fusion_emitters=false'
  python benchmarks/scaling.py --json docs/scaling.json \\
      --figure docs/images/scaling.png

The whole step is compiled, sampling and augmentation included, for arrays
without content, and one size at a time is changed from WRN-10-1, 4 + 28 images
of 32 pixels, 10 classes, 1,024 unlabeled examples. Of each size the exponent
is fitted through all its points (1 is proportional), and the slope is that
between the two largest: FLOPs and bytes of a step for one more. A count does
not depend on how well the code is optimised: the flags compile it sooner. A row
that the file has is not compiled again.
"""

import argparse
import json
import pathlib
import re
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import hlo, steps
from benchmarks.hlo_bytes import padded
from flatmatch_jax.system import cli, files

BASE = {
  'batch': 4,
  'width': 1,
  'side': 32,
  'classes': 10,
  'examples': 1024,
}
# What is changed, for whom, and to what.
AXES = (
  ('batch', 'flatmatch', (4, 8, 16, 32)),
  ('width', 'flatmatch', (1, 2, 4, 8)),
  ('side', 'flatmatch', (16, 32, 64, 128)),
  ('classes', 'flatmatch', (10, 100, 1000, 10000)),
  ('examples', 'flatmatch', (1024, 2**14, 2**17, 2**20)),
  ('examples', 'flexmatch', (1024, 2**14, 2**17, 2**20)),
)
LABELS = {
  'batch': 'labeled images of a batch',
  'width': 'width of the network',
  'side': 'pixels of an image, a side',
  'classes': 'classes',
  'examples': 'unlabeled examples',
}


def count(method, sizes) -> dict[str, float]:
  """FLOPs and bytes accessed of a step; RandAugment's loops count once."""
  setup = steps.create(
    method,
    'split',
    f'wrn_10_{sizes["width"]}',
    sizes['batch'],
    sizes['examples'],
    sizes['classes'],
    sizes['side'],
  )
  jitted = jax.jit(steps.step(setup), donate_argnums=0)
  compiled = jitted.lower(*steps.shapes(setup)).compile()
  cost = compiled.cost_analysis()
  return {
    'flops': cost['flops'],
    'bytes': cost['bytes accessed'] - not_read(compiled.as_text()),
    'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
  }


def not_read(text: str) -> int:
  """Bytes that XLA counts as read and that are not.

  Of an array that a fusion only gathers from it counts the whole, such as all
  images where a batch is taken.
  """
  _, bodies = hlo.parse(text)
  extra = 0
  for body in bodies.values():
    for _, _, operation, rest in body:
      called = re.search(r'calls=%([^\s,]+)', rest)
      if operation == 'fusion' and called:
        extra += sum(map(_not_gathered, *_uses(bodies[called[1]])))
  return extra


def _uses(body):
  """Types of a computation's parameters; of each the lines that use it."""
  shapes = {line[0]: line[1] for line in body if line[2] == 'parameter'}
  uses = {name: [] for name in shapes}
  for line in body:
    for number, name in enumerate(hlo.operands(line[3])):
      if name in uses:
        uses[name].append((number, line))
  return shapes.values(), uses.values()


def _not_gathered(shape, uses):
  """What is left of a parameter by its gathers, if they are its only uses."""
  if not all(number == 0 and line[2] == 'gather' for number, line in uses):
    return 0
  taken = sum(padded(line[1]) for _, line in uses)
  return max(0, padded(shape) - taken)


def measure(known: list[dict], save) -> list[dict]:
  """All rows, those already `known` as they are; `save` takes each list."""
  rows = list(known)
  for axis, method, values in AXES:
    for value in values:
      about = BASE | {axis: value, 'method': method}
      if any(about.items() <= row.items() for row in rows):
        continue
      rows.append(about | count(method, about))
      save(rows)
      print(rows[-1], file=sys.stderr, flush=True)
  return rows


def points(rows, axis, method):
  """The rows in which nothing but `axis` is changed, in its order."""
  same = {**BASE, 'method': method}
  del same[axis]
  found = [row for row in rows if same.items() <= row.items()]
  return sorted(found, key=lambda row: row[axis])


def growth(x, y) -> tuple[float, float]:
  """The exponent through all points, and the slope of the last two."""
  exponent = np.polyfit(np.log(x), np.log(y), 1)[0]
  return float(exponent), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


def table(rows) -> str:
  """Markdown: a line for each size and count."""
  lines = [
    '| size | method | from | to | count | × | exponent | one more costs |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for axis, method, _ in AXES:
    found = points(rows, axis, method)
    x = [row[axis] for row in found]
    for name, unit in (('flops', 'FLOP'), ('bytes', 'B')):
      y = [row[name] for row in found]
      exponent, slope = growth(x, y)
      exponent = round(exponent, 3) + 0.0  # Never -0.
      lines.append(
        f'| {axis} | {method} | {x[0]} | {x[-1]} | {name} | '
        f'{y[-1] / y[0]:.3f} | {exponent:.3f} | {_short(slope)}{unit} |'
      )
  return '\n'.join(lines)


def _short(value):
  if abs(value) < 0.5:  # Of millions: where instructions were fused otherwise.
    return '0 '
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if abs(value) >= size:
      return f'{value / size:.3g} {letter}'
  return f'{value:.3g} '


def draw(rows, path):
  """FLOPs and bytes relative to the smallest, a panel for each size."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(4 * len(LABELS), 3.6), layout='constrained')
  FigureCanvasAgg(figure)  # No display, no global state.
  axes = dict(zip(LABELS, figure.subplots(1, len(LABELS)), strict=True))
  for axis, method, _ in AXES:
    found = points(rows, axis, method)
    x = np.array([row[axis] for row in found])
    for name, style in (('flops', '-'), ('bytes', '--')):
      y = np.array([row[name] for row in found])
      label = f'{method}, {"FLOPs" if name == "flops" else name}'
      colour = 'C0' if method == 'flatmatch' else 'C1'
      axes[axis].plot(x, y / y[0], style, color=colour, marker='.', label=label)
    axes[axis].set(xscale='log', yscale='log', xlabel=LABELS[axis])
    axes[axis].set_xticks(x, [f'{value:,}' for value in x], minor=False)
  for panel in axes.values():
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, 0.8), max(high, 2))
    panel.set_xticks([], minor=True)
    ticks = [t for t in (1, 2, 5, 10, 20, 50) if t <= panel.get_ylim()[1]]
    panel.set_yticks(ticks, ticks, minor=False)
    panel.set_yticks([], minor=True)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize='small')
  axes['batch'].set_ylabel('of a step, relative to the smallest')
  with files.replacing(path) as file:
    figure.savefig(file, format='png', dpi=110)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--json', type=pathlib.Path, help='file of rows')
  parser.add_argument('--figure', type=pathlib.Path)
  args = parser.parse_args()
  for option in ('json', 'figure'):
    if target := getattr(args, option):
      files.check_target(f'--{option}', target)
  file = args.json
  known = json.loads(file.read_text()) if file and file.exists() else []
  save = lambda rows: (
    file and file.write_text(json.dumps(rows, indent=1) + '\n')
  )
  rows = measure(known, save)
  print(table(rows))
  if args.figure:
    draw(rows, args.figure)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
