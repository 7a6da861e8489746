"""Learning real digits from 40 labels: every method, seeds 0 to 2.

  python benchmarks/digits.py [--methods flatmatch,fixmatch] [--steps 500]

Prints a table of test errors in percent (last evaluation, mean ± standard
deviation over seeds) and writes it with every run below --out. Seed s trains
with seed s on split s. LabelSpreading of scikit-learn sees the same splits.
A run that is finished there is not repeated: several processes may share the
methods between them, and one call at the end make the table of all.
"""

import argparse
import json
import pathlib
import sys
import warnings

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import digits as digits_config
from flatmatch_jax import methods
from flatmatch_jax.data import sources, splits
from flatmatch_jax.run import plots
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import loop

METHODS = (*methods.METHODS, 'sam', 'flatmatch', 'flatmatch_e', 'flatmatch_fix')
SEEDS = (0, 1, 2)
GAMMAS = (3.0, 10.0, 20.0, 30.0)


def label_spreading(seed: int) -> float:
  """The lowest test error over kernel widths, to be fair to it."""
  from sklearn.semi_supervised import LabelSpreading

  data = sources.digits()
  flat = lambda images: images.reshape(len(images), -1) / 255
  labeled = splits.balanced(data.train_labels, 40, seed, 10)
  labels = np.full(len(data.train_labels), -1)
  labels[labeled] = data.train_labels[labeled]
  errors = []
  for model in [
    *(LabelSpreading(kernel='rbf', gamma=gamma / 64) for gamma in GAMMAS),
    *(LabelSpreading(kernel='knn', n_neighbors=k) for k in (5, 7, 10)),
  ]:
    with warnings.catch_warnings(action='ignore'):  # Of points it cannot reach.
      model.fit(flat(data.train_images), labels)
      wrong = model.predict(flat(data.test_images)) != data.test_labels
    errors.append(100 * wrong.mean())
  return float(min(errors))


def run(method: str, seed: int, steps: int | None, out: pathlib.Path) -> dict:
  """Trains, or reads a finished run; the result with its used fraction."""
  config = digits_config.get_config(
    f'method={method},seed={seed},split_seed={seed}'
  )
  if steps:
    config.steps = steps
  workdir = Workdir(str(out / f'{method}-{seed}'))
  loop.train_and_evaluate(config, str(workdir.path))
  used = [
    row['used_fraction']
    for row in workdir.metrics()
    if row.get('used_fraction') is not None
  ]
  return workdir.read('result.json') | {
    'used_fraction': used[-1] if used else None
  }


def table(rows: list[dict]) -> str:
  """Markdown, one line a method."""
  lines = [
    '| method | test error % (mean ± std) | seeds | seconds | used fraction |',
    '|---|---|---|---|---|',
  ]
  for row in rows:
    errors = ', '.join(f'{e:.2f}' for e in row['errors'])
    used = '' if row['used_fraction'] is None else f'{row["used_fraction"]:.2f}'
    seconds = '' if row['seconds'] is None else f'{row["seconds"]:.0f}'
    lines.append(
      f'| {row["method"]} | {np.mean(row["errors"]):.2f} ± '
      f'{np.std(row["errors"], ddof=1):.2f} | {errors} | {seconds} | {used} |'
    )
  return '\n'.join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--steps', type=int, help="the config's if left out")
  parser.add_argument('--out', default='runs/benchmark-digits')
  args = parser.parse_args()
  out = pathlib.Path(args.out)
  rows = [
    {
      'method': 'LabelSpreading',
      'errors': [label_spreading(seed) for seed in SEEDS],
      'seconds': None,
      'used_fraction': None,
    }
  ]
  for method in args.methods.split(','):
    results = [run(method, seed, args.steps, out) for seed in SEEDS]
    used = [
      r['used_fraction'] for r in results if r['used_fraction'] is not None
    ]
    rows.append(
      {
        'method': method,
        'errors': [r['error_last'] for r in results],
        'seconds': float(np.mean([r['seconds'] for r in results])),
        'used_fraction': float(np.mean(used)) if used else None,
      }
    )
  (out / 'table.json').write_text(json.dumps(rows, indent=2) + '\n')
  (out / 'table.md').write_text(table(rows) + '\n')
  plots.comparison(
    {
      method: [
        Workdir(str(out / f'{method}-{seed}')).metrics() for seed in SEEDS
      ]
      for method in args.methods.split(',')
    },
    out / 'errors.png',
  )
  print(table(rows))


if __name__ == '__main__':
  main()
