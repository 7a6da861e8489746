"""The paper's analyses of a finished or running run, as data and figures.

  python -m flatmatch_jax.analyze --workdir DIR [DIR …]
      [--what landscape,sharpness,hessian,gradients,pseudo_labels,…]
      [--checkpoint best]

Writes DIR/analysis/NAME.npz with the numbers and NAME.png and .svg; with
several runs also compared_NAME.png and .svg of all of them into the first. Runs
that differ in seeds only are taken together. Prints a table of the numbers that
one compares, as mean ± standard deviation over seeds.
"""

import collections
import pathlib

import numpy as np

from flatmatch_jax.analysis import canvas, figures, setting, summary
from flatmatch_jax.analysis.measures import ANALYSES
from flatmatch_jax.run.settings import as_dict, differences
from flatmatch_jax.system import cli, files, messages
from flatmatch_jax.types import UserError, check_known


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.analyze', description='Analyses of runs.'
  )
  parser.add_argument(
    '--workdir', required=True, nargs='+', help='folders of runs'
  )
  parser.add_argument(
    '--what',
    default=','.join(ANALYSES),
    help=f'joined by commas, of {", ".join(ANALYSES)}; all if left out',
  )
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--data_dir', help='folder of the data, if it has moved')
  parser.add_argument(
    '--images', type=int, default=256, help='images of each loss'
  )
  parser.add_argument(
    '--points', type=int, default=21, help='a side of the landscapes, odd'
  )
  parser.add_argument(
    '--rotate',
    type=float,
    default=90.0,
    help="degrees of the landscapes' random rotation",
  )
  args = parser.parse_args()
  args.workdir = list(dict.fromkeys(args.workdir))
  names = args.what.split(',')
  _check(args, names)

  # All are read before anything is computed.
  loaded = [
    setting.load(
      workdir, args.checkpoint, args.data_dir, args.images, args.rotate
    )
    for workdir in args.workdir
  ]
  folders = [_make_folder(given) for given in loaded]
  labels = _labels(loaded)
  for name in names:
    runs: dict[str, list[dict]] = collections.defaultdict(list)
    for label, given, folder in zip(labels, loaded, folders, strict=True):
      messages.say(f'{name} of {given.files.path}')
      data = ANALYSES[name](given, args)
      if isinstance(data, str):
        messages.say(f'No {name} of {given.files.path}: {data}.')
        continue
      runs[label].append(data)
      _save(folder / f'{name}.npz', data, given)
      _draw(name, {label: [data]}, folder / name)
    if sum(map(len, runs.values())) > 1 and not _draw(
      name, runs, folders[0] / f'compared_{name}'
    ):
      messages.say(
        f'No figure of the {name} of all: besides their seeds the runs must '
        'differ in one number of their configs, and in nothing else.'
      )
    if runs:
      print(summary.table(name, runs))
  print(f'Figures are in {", ".join(map(str, folders))}')


def _check(args, names):
  for name in names:
    check_known('analysis', name, ANALYSES)
  if args.points < 3 or not args.points % 2:
    raise UserError(
      f'--points={args.points} must be odd and at least 3, so that the middle '
      'is the checkpoint itself.'
    )
  if args.images < 1:
    raise UserError(f'--images={args.images} must be at least 1.')
  if not 0 <= args.rotate <= 180:
    raise UserError(f'--rotate={args.rotate} must lie from 0 to 180 degrees.')


def _labels(loaded) -> list[str]:
  """The setting of each run: its method, and what else tells it from others.

  Runs that differ in seeds only have the same.
  """
  alike = collections.defaultdict(list)
  for number, given in enumerate(loaded):
    config = given.run.config
    alike[config.dataset, config.method].append(number)
  datasets = {dataset for dataset, _ in alike}
  labels = [''] * len(loaded)
  for (dataset, method), numbers in alike.items():
    texts = differences(
      [
        as_dict(loaded[i].run.config)
        | {'images': loaded[i].run.dataset.get('fingerprint')}
        for i in numbers
      ]
    )
    where = dataset if len(datasets) > 1 else ''
    for i, text in zip(numbers, texts, strict=True):
      labels[i] = ', '.join(filter(None, (method, where, text)))
  return labels


def _make_folder(given) -> pathlib.Path:
  folder = given.files.path / 'analysis'
  try:
    files.make_folder(folder)
  except OSError as error:
    raise UserError(f'Cannot make {folder}: {error.strerror}.') from None
  return folder


def _draw(name, runs, path) -> bool:
  """Whether there is something to draw."""
  figure = figures.FIGURES[name](runs)
  if figure:
    canvas.save(figure, path)
  return bool(figure)


def _save(path: pathlib.Path, data: dict, given) -> None:
  with files.replacing(path) as file:
    np.savez_compressed(file, checkpoint=int(given.run.state.step), **data)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
