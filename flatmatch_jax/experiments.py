"""The paper's tables as commands.

  python -m flatmatch_jax.experiments                       # lists the tables
  python -m flatmatch_jax.experiments table1 --seeds 0      # ready to paste
  python -m flatmatch_jax.experiments all --dry_run         # does each start?

A dry run traces the training step of each command on arrays without content:
nothing is loaded, downloaded or compiled. docs/paper.md explains how the
commands read what the paper leaves open, and what their cost counts.
"""

import argparse
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax import data
from flatmatch_jax.data.pipeline import parted
from flatmatch_jax.paper import cells, cost
from flatmatch_jax.paper.tables import TABLES, TITLES
from flatmatch_jax.step import forward
from flatmatch_jax.system import cli
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import program, rules
from flatmatch_jax.types import Batch, DatasetInfo, UserError, check_known


def abstract_batch(config, views: tuple[str, ...], fixed: bool) -> Batch:
  """The batch of a step as shapes, wherever its images come from."""
  _, shape = cost.IMAGES[config.dataset]
  images = lambda n: jax.ShapeDtypeStruct((n, *shape), jnp.float32)
  numbers = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
  batches = []
  sizes = config.batch_size, config.unlabeled_batch_size
  for size, names, label in zip(
    sizes, parted(views), ('label', 'truth'), strict=True
  ):
    batch: Any = {name: images(size) for name in names}
    batches.append(batch | {name: numbers(size) for name in ('index', label)})
  labeled, unlabeled = batches
  return Batch(labeled, unlabeled, labeled if fixed else None)


def trace(config) -> None:
  """Traces the steps that the config trains by, from the initial state."""
  size, shape = cost.IMAGES[config.dataset]
  classes = data.SOURCES[config.dataset].num_classes or 0
  info = DatasetInfo(classes, size, size, (1,) * classes)
  remembering = lambda network, *args: forward.make_forward(
    _Remembered(network), *args
  )
  made = program.create(config, info, shape, remembering)
  state = jax.eval_shape(made.init, jax.eval_shape(jax.random.key, 0))
  fixes = bool(cost.fix_at(config))
  batch = abstract_batch(config, made.views, fixes)
  if fixes and made.pretrain_step:
    jax.eval_shape(made.pretrain_step, state, batch._replace(fixed=None))
  after, _ = jax.eval_shape(made.step, state, batch)
  if jax.tree.map(_kind, after) != jax.tree.map(_kind, state):
    raise TypeError('a step changes the shapes or types of the state')


def _kind(x):
  return x.shape, x.dtype


class _Remembered(NamedTuple):
  """A network whose passes are traced once for all commands that have it."""

  network: Any

  def apply(self, *args, train, mutable, **kwargs):
    return _apply(self.network, train, tuple(mutable), args, kwargs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(network, train, mutable, args, kwargs):
  return network.apply(*args, train=train, mutable=list(mutable), **kwargs)


def dry_run(chosen: list[cells.Cell], seeds: list[int]) -> bool:
  """Prints of each command whether it starts; returns whether all do."""
  reasons: dict[str, str | None] = {}
  failures = 0
  for cell in chosen:
    for seed in seeds:
      reason = _objection(cell, seed, reasons)
      failures += reason is not None
      verdict = 'starts' if reason is None else f'fails ({reason})'
      print(f'{verdict}: {cell.command(seed)}', flush=True)
  return not failures


def _objection(cell, seed, reasons) -> str | None:
  """Why a command would not start; `reasons` are those of traces so far."""
  try:
    config = cell.config(seed)
    config_lib.check(config)
  except UserError as error:
    return str(error)
  key = _what_is_traced(config)
  if key not in reasons:
    try:
      trace(config)
      reasons[key] = None
    except Exception as error:  # Whatever it is, the others are tried too.
      reasons[key] = f'{type(error).__name__}: {error}'.splitlines()[0]
  return reasons[key]


def _what_is_traced(config):
  """Equal for configs with one trace: an argument counts by not being zero."""
  fields = config.to_dict()
  for name in ('seed', 'split_seed', 'labels', 'variant'):
    del fields[name]
  for name in ('method_args', 'recipe_args'):
    fields[name] = {key: bool(value) for key, value in fields[name].items()}
  return f'{fields} {cost.fix_at(config)}'


def commands(table: str, seeds: list[int]) -> str:
  """The commands of a table for a shell, with what the paper got in between."""
  lines = [f'# {TITLES[table]}']
  source = 'USB' if table == 'usb' else 'the paper'
  for cell in cells.runs(table):
    config = cell.config()
    lines.append(
      f'\n# {cells.name(cell.method)}, {cell.dataset}, labels={cell.labels}: '
      f'error {cell.error}% in {source}; {config.steps:,} steps, '
      f'{_exa(cost.flops(config))} exaFLOPs each'
    )
    lines += [cell.command(seed) for seed in seeds]
  return '\n'.join(lines)


def _exa(number):
  return f'{number / 1e18:.3g}'


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.experiments',
    description="The paper's tables as commands; without a table, their names.",
  )
  parser.add_argument('table', nargs='*', help=f'{", ".join(TABLES)} or all')
  parser.add_argument(
    '--seeds', type=seed, nargs='+', default=[0, 1, 2], metavar='SEED'
  )
  parser.add_argument(
    '--dry_run', action='store_true', help='trace each instead'
  )
  args = parser.parse_args()
  tables = _chosen(args.table)
  if not tables:
    for table, title in TITLES.items():
      print(f'{table:12} {title}, {len(cells.runs(table))} cells')
    print('Name one, or all, to see its commands; with --dry_run to try them.')
  elif args.dry_run:
    # Tables share cells.
    chosen = dict.fromkeys(
      cell for table in tables for cell in cells.runs(table)
    )
    if not dry_run(list(chosen), args.seeds):
      sys.exit(1)
  else:
    print('\n\n'.join(commands(table, args.seeds) for table in tables))


def seed(text: str) -> int:
  number = int(text)
  if not rules.FIELDS['seed'].holds(number):
    raise argparse.ArgumentTypeError(f'{text} is not {rules.FIELDS["seed"]}')
  return number


def _chosen(names):
  """The tables called `names`, one of which may be 'all'."""
  for table in names:
    check_known('table', table, (*TABLES, 'all'))
  return list(TABLES) if 'all' in names else names


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
