"""Learning real digits from few labels: every method, several seeds.

  python benchmarks/digits.py [--methods flatmatch,fixmatch] [--steps 500]
  python benchmarks/digits.py --seeds 10 --labels 20,40 \\
      --recipes plain,flatmatch
  python benchmarks/digits.py --seeds 10 --labels 100 --imbalance 10,50 \\
      --methods fixmatch,freematch,flatmatch,debiaspl,abc,saw,daso

Prints a table of test errors in percent at the last evaluation, as mean ±
standard deviation over seeds, and writes it with every run below --out. Seed s
trains with seed s on split s; LabelSpreading of scikit-learn sees the same
splits. With an imbalance labeled and unlabeled images have a long tail, and
the balanced error is the mean of those of the classes. Differences are to
FixMatch with the same seed: mean ± standard error.

A finished run is not repeated and an interrupted one resumes, so several
processes may share the methods between them, and one call at the end make the
table of all.
"""

import argparse
import json
import math
import pathlib
import sys
import warnings

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import digits as digits_config
from flatmatch_jax import methods, sweep
from flatmatch_jax.data import sources, splits
from flatmatch_jax.run import plots
from flatmatch_jax.step import recipes

METHODS = (*methods.METHODS, 'sam', 'flatmatch', 'flatmatch_e', 'flatmatch_fix')
GAMMAS = (3.0, 10.0, 20.0, 30.0)


def label_spreading(labels: int, imbalance: float, seed: int) -> dict:
  """The lowest test error over kernel widths, to be fair to it."""
  from sklearn.semi_supervised import LabelSpreading

  data = sources.digits()
  flat = lambda images: images.reshape(len(images), -1) / 255
  split = splits.make(
    data.train_labels,
    10,
    labels,
    seed,
    imbalance=imbalance,
    unlabeled_imbalance=imbalance,
  )
  known = np.full(len(data.train_labels), -1)
  known[split.labeled] = data.train_labels[split.labeled]
  results = []
  for model in [
    *(LabelSpreading(kernel='rbf', gamma=gamma / 64) for gamma in GAMMAS),
    *(LabelSpreading(kernel='knn', n_neighbors=k) for k in (5, 7, 10)),
  ]:
    with warnings.catch_warnings(action='ignore'):  # Of points it cannot reach.
      model.fit(
        flat(data.train_images[split.unlabeled]), known[split.unlabeled]
      )
      wrong = model.predict(flat(data.test_images)) != data.test_labels
    by_class = [wrong[data.test_labels == k].mean() for k in range(10)]
    results.append((100 * wrong.mean(), 100 * np.mean(by_class)))
  error, balanced = min(results)
  return {'error': float(error), 'balanced_error': float(balanced)}


def train(method, labels, imbalance, args, folder) -> tuple[list, list]:
  """Trains one run per seed, or reads those that are finished.

  Returns the numbers of each run, and its rows along training.
  """
  config = digits_config.get_config(f'method={method},labels={labels}')
  config.imbalance = config.unlabeled_imbalance = imbalance
  if args.steps:
    config.steps = args.steps
  seeds = {'seeds': list(range(args.seeds))}
  members = sweep.sweep(config, str(folder / method), seeds)
  found, curves = [], []
  for member in members:
    rows = member.files.metrics()
    last = {key: value for row in rows for key, value in row.items()}
    names = 'error', 'balanced_error', 'used_fraction'
    seconds = member.files.read('result.json')['seconds']
    found.append({k: last.get(k) for k in names} | {'seconds': seconds})
    curves.append(rows)
  return found, curves


def summary(runs: list[dict], key: str) -> str:
  values = [run[key] for run in runs if run.get(key) is not None]
  if not values:
    return ''
  if key == 'seconds':
    return f'{np.mean(values):.0f}'
  spread = f' ± {np.std(values, ddof=1):.2f}' if len(values) > 1 else ''
  return f'{np.mean(values):.2f}{spread}'


def difference(runs: list[dict], others: list[dict], key: str) -> str:
  """Of seed by seed: mean ± standard error, '' without something to compare."""
  if len(runs) < 2 or len(runs) != len(others) or runs is others:
    return ''
  pairs = zip(runs, others, strict=True)
  values = [run[key] - other[key] for run, other in pairs]
  error = np.std(values, ddof=1) / math.sqrt(len(values))
  return f'{np.mean(values):+.2f} ± {error:.2f}'


def table(found: dict[str, list[dict]], imbalance: float = 1.0) -> str:
  """Markdown, one line a method; with a tail, of the balanced error."""
  error = 'error' if imbalance == 1 else 'balanced_error'
  lines = [
    f'| method | {error.replace("_", " ")} % | to FixMatch | seconds '
    '| used fraction |',
    '|---|---|---|---|---|',
  ]
  for method, runs in found.items():
    cells = [
      summary(runs, error),
      difference(runs, found.get('fixmatch', []), error),
      summary(runs, 'seconds'),
      summary(runs, 'used_fraction'),
    ]
    lines.append(f'| {method} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def record(found: dict[str, list[dict]]) -> str:
  """JSON, one line a method: the numbers of its seeds."""
  single = lambda x: x if x is None else round(x, 2)
  lines = [
    f'{json.dumps(method)}: '
    + json.dumps({k: [single(run[k]) for run in runs] for k in runs[0]})
    for method, runs in found.items()
  ]
  return '{\n' + ',\n'.join(lines) + '\n}\n'


def names(args) -> list[str]:
  """Each method under each recipe, where it makes sense, and once."""
  found: dict = {}
  for name in args.methods.split(','):
    method, own = recipes.parse(name)
    has_unlabeled = bool(methods.asks(method).views)
    for recipe in args.recipes.split(','):
      under = name if recipe == 'plain' else f'{name}+{recipe}'
      if recipe == 'plain' or (
        own == 'plain' and not recipes.objection(method, recipe, has_unlabeled)
      ):
        found.setdefault(recipes.parse(under), under)
  return list(found.values())


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--recipes', default='plain')
  parser.add_argument('--seeds', type=int, default=3, help='how many, from 0')
  parser.add_argument('--labels', default='40', help='numbers, by commas')
  parser.add_argument('--imbalance', default='1', help='numbers, by commas')
  parser.add_argument('--steps', type=int, help="the config's if left out")
  parser.add_argument('--out', default='runs/benchmark-digits')
  args = parser.parse_args()
  for labels in map(int, args.labels.split(',')):
    for imbalance in map(float, args.imbalance.split(',')):
      compare(labels, imbalance, args)


def compare(labels: int, imbalance: float, args):
  """Trains all methods, and writes what is there after each."""
  folder = pathlib.Path(args.out) / f'labels={labels}-imbalance={imbalance:g}'
  found = {
    'LabelSpreading': [
      label_spreading(labels, imbalance, seed) for seed in range(args.seeds)
    ]
  }
  curves = {}
  for method in names(args):
    found[method], curves[method] = train(
      method, labels, imbalance, args, folder
    )
    (folder / 'table.json').write_text(record(found))
    (folder / 'table.md').write_text(table(found, imbalance) + '\n')
  plots.comparison(curves, folder / 'errors.png')
  print(f'\n{labels} labels, imbalance {imbalance:g}\n')
  print(table(found, imbalance))


if __name__ == '__main__':
  main()
