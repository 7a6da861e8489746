"""The paper's analyses of a finished or running run, as data and figures.

  python -m flatmatch_jax.analyze --workdir DIR [DIR …]
      [--what landscape,sharpness] [--checkpoint best]

Writes DIR/analysis/NAME.npz with the numbers and NAME.png and .svg; with
several runs also compared_NAME.png and .svg of all of them into the first.
"""

import functools
import pathlib

import jax
import numpy as np
from tqdm import tqdm

from flatmatch_jax import cli, files, logging, probe
from flatmatch_jax.analysis import figures, landscape, setting, sharpness
from flatmatch_jax.types import UserError

_RHOS = np.linspace(0.0, 0.5, 21)
_LOGGED = ('sharpness', 'cross_sharpness', 'held_out_sharpness')


def analyze_landscape(given: setting.Setting, args) -> dict:
  """Both losses on a plane through θ, and along its first direction."""
  params = given.run.state.params
  directions = tuple(
    landscape.random_direction(key, params)
    for key in jax.random.split(jax.random.key(0))
  )
  at = np.linspace(-1, 1, args.points)
  curve_at = np.linspace(-1, 1, 4 * args.points - 3)
  found = {'at': at, 'curve_at': curve_at}
  for name, loss in given.rotated.items():
    bar = functools.partial(
      tqdm, desc=f'{name} landscape', disable=None, leave=False
    )
    compute = functools.partial(landscape.surface, loss, params, progress=bar)
    found[f'{name}_surface'] = compute(directions, at)
    found[f'{name}_curve'] = compute(directions[:1], curve_at)
  return found


def analyze_sharpness(given: setting.Setting, args) -> dict:
  """Over ρ at the checkpoint; over steps as the run logged it."""
  del args
  losses, params = given.losses, given.run.state.params
  found = {
    'rho': _RHOS,
    'labeled_rise': sharpness.rises(
      losses['labeled'], losses['labeled'], params, _RHOS
    ),
    'cross_rise': sharpness.rises(
      losses['unlabeled'], losses['labeled'], params, _RHOS
    ),
  }
  if 'held_out' in losses:
    found['held_out_rise'] = sharpness.rises(
      losses['held_out'], losses['held_out'], params, _RHOS
    )
  if logged := _logged(given, _LOGGED):
    rho = given.run.config.recipe_args.get('rho', probe.DEFAULT_RHO)
    found |= logged | {'log_rho': rho}
  return found


def _logged(given, keys) -> dict:
  """What the run probed along training, by step; empty if it never did."""
  rows = [r for r in given.files.metrics() if keys[0] in r]
  if not rows:
    return {}
  return {
    f'log_{key}': np.array([row[key] for row in rows], float)
    for key in ('step', *keys)
    if key in rows[0]
  }


ANALYSES = {'landscape': analyze_landscape, 'sharpness': analyze_sharpness}


def main():
  parser = cli.Parser(description='Analyses of runs.')
  parser.add_argument(
    '--workdir', required=True, nargs='+', help='folders of runs'
  )
  parser.add_argument(
    '--what',
    default=','.join(ANALYSES),
    help='analyses, joined by commas; all if left out',
  )
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--data_dir', help='folder of the data, if it has moved')
  parser.add_argument(
    '--images', type=int, default=256, help='images of each loss'
  )
  parser.add_argument(
    '--points', type=int, default=17, help='a side of the landscapes, odd'
  )
  parser.add_argument(
    '--rotate',
    type=float,
    default=90.0,
    help="degrees of the landscapes' random rotation",
  )
  args = parser.parse_args()
  names = args.what.split(',')
  _check(args, names)

  found: dict[str, dict[str, dict]] = {name: {} for name in names}
  folders = []
  for workdir in args.workdir:
    given = setting.load(
      workdir, args.checkpoint, args.data_dir, args.images, args.rotate
    )
    folders.append(given.files.path / 'analysis')
    folders[-1].mkdir(exist_ok=True)
    for name in names:
      logging.say(f'{name} of {given.files.path}')
      data = ANALYSES[name](given, args)
      _save(folders[-1] / f'{name}.npz', data, given)
      label = _label(given, found[name])
      found[name][label] = data
      figures.save(figures.FIGURES[name]({label: data}), folders[-1] / name)
  if len(folders) > 1:
    for name, runs in found.items():
      path = folders[0] / f'compared_{name}'
      figures.save(figures.FIGURES[name](runs), path)
  print(f'Figures are in {", ".join(map(str, dict.fromkeys(folders)))}')


def _check(args, names):
  for name in names:
    if name not in ANALYSES:
      raise UserError(
        f'Unknown analysis {name!r} in --what; known: {", ".join(ANALYSES)}.'
      )
  if args.points < 3 or not args.points % 2:
    raise UserError(
      f'--points={args.points} must be odd and at least 3, so that the middle '
      'is the checkpoint itself.'
    )
  if args.images < 1:
    raise UserError(f'--images={args.images} must be at least 1.')
  if not 0 <= args.rotate <= 180:
    raise UserError(f'--rotate={args.rotate} must lie from 0 to 180 degrees.')


def _label(given, taken) -> str:
  """The method, and the folder's name where methods are the same."""
  name = given.run.config.method
  return f'{name} ({given.files.path.name})' if name in taken else name


def _save(path: pathlib.Path, data: dict, given) -> None:
  with files.replacing(path) as file:
    np.savez_compressed(file, checkpoint=int(given.run.state.step), **data)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
