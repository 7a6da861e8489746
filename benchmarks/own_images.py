"""Is FlatMatch worth it on your images? Compares it with two baselines.

  python benchmarks/own_images.py --variant image_size=64,labels=100 \
    --data_dir DIR --seeds 0,1,2,3,4 --set flip=false --set steps=2000
  python benchmarks/own_images.py --config digits.py --out runs/digits

For each seed, with labels drawn by it: logistic regression on pixels,
supervised training, and FlatMatch, both with the config's own settings. Prints
a table of test errors, writes it to --out, and exits with code 1 if FlatMatch
is worse than supervised training on average. Finished runs are not repeated.
"""

import argparse
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flatmatch_jax import data, sweep
from flatmatch_jax.data import splits
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, startup
from flatmatch_jax.training import load, loop, setup
from flatmatch_jax.types import UserError

METHODS = ('supervised', 'flatmatch')


def logistic_regression(dataset, split: splits.Split) -> float:
  """Test error in percent, from the labeled images' pixels."""
  from sklearn.linear_model import LogisticRegression
  from threadpoolctl import threadpool_limits

  flat = lambda images: images.reshape(len(images), -1) / 255
  model = LogisticRegression(max_iter=2000)
  labels = dataset.train_labels[split.labeled]
  with threadpool_limits(1):  # More threads wait for each other on busy cores.
    model.fit(flat(dataset.train_images[split.labeled]), labels)
    wrong = model.predict(flat(dataset.test_images)) != dataset.test_labels
  return 100 * float(wrong.mean())


def make_config(args, method: str, seed: int):
  parts = [args.variant, f'method={method}', f'seed={seed},split_seed={seed}']
  argument = ','.join(filter(None, parts))
  config = load.load_config(args.config, argument)
  config.data_dir = args.data_dir
  settings = sweep.read_settings(args.set, [])
  if chosen := {'method', 'seed', 'split_seed', 'seeds'} & settings.keys():
    raise UserError(f'--set {chosen.pop()}: the comparison sets it.')
  if method == 'supervised':  # What belongs to FlatMatch is not for it.
    own = ('method_args.', 'recipe_args.')
    settings = {k: v for k, v in settings.items() if not k.startswith(own)}
  (member, *more) = sweep.combine(config, args.out, settings)
  if more:
    raise UserError('--set takes one value for each field here.')
  return member.config


def errors_of(args, seed: int) -> dict[str, float]:
  """Test errors of one draw of labels."""
  config = make_config(args, 'flatmatch', seed)
  dataset = data.from_config(config)
  if not len(dataset.test_labels):
    raise UserError('There are no test images to measure errors on.')
  split = setup.choose_split(config, dataset)
  errors = {'logistic regression': logistic_regression(dataset, split)}
  for method in METHODS:
    workdir = pathlib.Path(args.out) / f'{method}-{seed}'
    loop.train_and_evaluate(make_config(args, method, seed), str(workdir))
    result = Workdir(str(workdir)).read('result.json')
    errors[method] = result['error_last']
  return errors


def table(rows: dict[int, dict[str, float]]) -> str:
  """Markdown: a line for each method."""
  names = list(next(iter(rows.values())))
  lines = [
    f'| test error % | {" | ".join(f"seed {s}" for s in rows)} | mean |',
    '|---' * (len(rows) + 2) + '|',
  ]
  for name in names:
    errors = [row[name] for row in rows.values()]
    cells = [f'{error:.2f}' for error in (*errors, statistics.mean(errors))]
    lines.append(f'| {name} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main():
  parser = cli.Parser(
    description=__doc__.splitlines()[0],
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  parser.add_argument('--config', default='folder.py', help='in configs/')
  parser.add_argument(
    '--variant',
    default='',
    help='what main.py takes after the colon',
  )
  parser.add_argument('--data_dir', default='', help='or file')
  parser.add_argument('--seeds', default='0,1,2,3,4')
  parser.add_argument(
    '--set', action='append', default=[], help='FIELD=VALUE of the config'
  )
  parser.add_argument('--out', default='runs/own_images')
  args = parser.parse_args()
  startup.use_cores(make_config(args, 'flatmatch', 0))
  rows = {}
  for seed in map(int, args.seeds.split(',')):
    rows[seed] = errors_of(args, seed)
    text = table(rows)
    (pathlib.Path(args.out) / 'table.md').write_text(text + '\n')
    print(text, flush=True)
  gain = statistics.mean(
    row['supervised'] - row['flatmatch'] for row in rows.values()
  )
  word = 'below' if gain >= 0 else 'above'
  print(f'FlatMatch is {abs(gain):.2f} points {word} supervised training.')
  raise SystemExit(gain < 0)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
