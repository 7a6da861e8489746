"""The paper's tables as commands.

  python -m flatmatch_jax.experiments                       # lists the tables
  python -m flatmatch_jax.experiments table1 --seeds 0      # ready to paste
  python -m flatmatch_jax.experiments all --dry_run         # does each start?
  python -m flatmatch_jax.experiments --markdown > docs/experiments.md

A dry run traces the training step of each command on arrays without content:
nothing is loaded, downloaded or compiled.
"""

import argparse
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax import data
from flatmatch_jax.paper import cells, cost
from flatmatch_jax.paper.tables import TABLES, TITLES
from flatmatch_jax.step import forward
from flatmatch_jax.system import cli
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import program, rules
from flatmatch_jax.types import Batch, DatasetInfo, UserError, did_you_mean


def abstract_batch(config, views: tuple[str, ...], fixed: bool) -> Batch:
  """The batch of a step as shapes, wherever its images come from."""
  _, shape = cost.IMAGES[config.dataset]
  images = lambda n: jax.ShapeDtypeStruct((n, *shape), jnp.float32)
  numbers = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
  labeled: Any = {
    'weak': images(config.batch_size),
    'label': numbers(config.batch_size),
  }
  unlabeled: Any = {name: images(config.unlabeled_batch_size) for name in views}
  for name in ('index', 'truth'):
    unlabeled[name] = numbers(config.unlabeled_batch_size)
  return Batch(labeled, unlabeled, labeled if fixed else None)


def trace(config) -> None:
  """Traces the steps that the config trains by, from the initial state."""
  size, shape = cost.IMAGES[config.dataset]
  classes = data.SOURCES[config.dataset].num_classes or 0
  info = DatasetInfo(classes, size, size)
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
  for cell in cells.runs(table):
    config = cell.config()
    lines.append(
      f'\n# {cells.name(cell.method)}, {cell.dataset}, labels={cell.labels}: '
      f'error {cell.error}% in the paper; {config.steps:,} steps, '
      f'{_exa(cost.flops(config))} exaFLOPs each'
    )
    lines += [cell.command(seed) for seed in seeds]
  return '\n'.join(lines)


def _exa(number):
  return f'{number / 1e18:.3g}'


def section(table: str) -> str:
  """A table in Markdown, with the command of each cell under it."""
  found, commanded = cells.cells(table), cells.runs(table)
  total = sum(cost.flops(cell.config()) for cell in commanded)
  lines = [
    f'## {TITLES[table]}',
    '',
    f'`python -m flatmatch_jax.experiments {table}`: {len(commanded)} cells, '
    f'{_exa(total)} exaFLOPs for one seed of each.',
  ]
  for dataset in dict.fromkeys(cell.dataset for cell in found):
    lines += ['', *_rows([cell for cell in found if cell.dataset == dataset])]
  listed = [cell.command(0) for cell in commanded]
  summary = 'The commands, with seed 0'
  lines += ['', f'<details><summary>{summary}</summary>', '', '```']
  lines += [*listed, '```', '', '</details>']
  return '\n'.join(lines)


def _rows(found):
  """Methods down, labels across, as in the paper; then what a run costs."""
  columns = list(dict.fromkeys(cell.labels for cell in found))
  head = [f'{found[0].dataset}, labels=', 'method=']
  head += [*(column.replace(',', ', ') for column in columns)]
  head += ['steps', 'exaFLOPs']
  lines = [head, ['---'] * len(head)]
  for title in dict.fromkeys(cells.name(cell.method) for cell in found):
    row = [cell for cell in found if cells.name(cell.method) == title]
    called = dict.fromkeys(f'`{cell.method}`' for cell in row)
    errors = {cell.labels: cell.error for cell in row}
    configs = [cell.config() for cell in row if cell.error != '-']
    steps = dict.fromkeys(f'{config.steps:,}' for config in configs)
    costs = dict.fromkeys(_exa(cost.flops(config)) for config in configs)
    lines.append(
      [title, '; '.join(called)]
      + [errors.get(column, '') for column in columns]
      + ['; '.join(steps), '; '.join(costs)]
    )
  return [f'| {" | ".join(line)} |' for line in lines]


def main():
  parser = cli.Parser(
    description="The paper's tables as commands; without a table, their names."
  )
  parser.add_argument('table', nargs='*', help=f'{", ".join(TABLES)} or all')
  parser.add_argument(
    '--seeds', type=seed, nargs='+', default=[0, 1, 2], metavar='SEED'
  )
  parser.add_argument(
    '--dry_run', action='store_true', help='trace each instead'
  )
  parser.add_argument(
    '--markdown', action='store_true', help='docs/experiments.md'
  )
  args = parser.parse_args()
  tables = _chosen(args.table or (['all'] if args.markdown else []))
  if not tables:
    for table, title in TITLES.items():
      print(f'{table:12} {title}, {len(cells.runs(table))} cells')
    print('Name one, or all, to see its commands; with --dry_run to try them.')
  elif args.markdown:
    print('\n\n'.join([INTRODUCTION.strip(), *map(section, tables)]))
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
    if table not in (*TABLES, 'all'):
      raise UserError(
        f'Unknown table {table!r}. Known: {", ".join(TABLES)}, and all.'
        + did_you_mean(table, TABLES)
      )
  return list(TABLES) if 'all' in names else names


INTRODUCTION = """
# The paper's tables as commands

Written by `python -m flatmatch_jax.experiments --markdown`; edit
`flatmatch_jax/experiments.py` and `flatmatch_jax/paper/tables.py` instead.

**None of these runs was done by this project at full length.** Errors are the
paper's: test error in percent, mean ± deviation.
`python -m flatmatch_jax.experiments all --dry_run` traces the training step of
every command; README.md says how far that was done.

    python -m flatmatch_jax.experiments TABLE                # ready to paste
    python -m flatmatch_jax.experiments TABLE --seeds 0 1
    python -m flatmatch_jax.experiments TABLE --dry_run

A cell is run with seeds 0, 1 and 2, each of which also draws its own labeled
images (`seed=1,split_seed=1`). A cell that two tables share has one workdir,
and is not run again. Cells that the paper leaves empty (-) have no command:
SoftMatch on CIFAR-10 with 10 labels and on SVHN with 250, and STL-10 fully
supervised, whose unlabeled images have no labels.

**Cost** is arithmetic, not measured: images forward and backward in a step (a
backward pass is two forward) × multiplications of the network × 2 × steps, with
BatchNorm `split`. It leaves out augmentation, normalization and tests, and
counts the zeros that convolutions pad with, so XLA's own count of a WRN-28-2
step is 8% lower. One exaFLOP is 5.6 hours at 50 TFLOP/s. Where the columns of a
row differ in cost, all numbers are given in their order, equal ones once.

What the paper leaves open, and how the commands read it; [paper.md](paper.md)
has the points of the algorithm itself:

- **Seeds**: their number is not given. Three here; ImageNet's errors have no
  deviation, so that seed 0 is enough there.
- **Steps**: not given ("2^20" once, called an epoch). As in the public code.
- **Which error**: not said; public code prints the best on test data.
  `result.json` has it beside the last and the median of the last 20.
- **Baselines**: "follow USB", but the rows that TorchSSL has too are its
  numbers, so the settings here are its own. "τ, μ and λ the same for all
  methods" holds in neither; each method has its own.
- **ρ**: 0.1 in the text, 0.05 in the supplement. 0.05 here.
- **CIFAR-10 with 10 labels**: which ones is not said. One of each class is
  drawn; `--config.labels_file` takes others.
- **Fix label**: where there are enough labels the command trains FlatMatch, as
  in the paper, whose two rows agree there. They also agree on SVHN with 250
  labels, although 250 < 500; the command fixes 500, as the text says.
- **X+FlatMatch with 250 labels**: the text fixes labels with 40, the caption
  says "with the fixed number of labels". Fixed with 40 only, except in the row
  called Fix label; `method=fixmatch+flatmatch_fix,labels=250` is the other
  reading.
- **Ablation**: the method under it is not named. FreeMatch, as for FlatMatch.
- **ImageNet30**: "30000 training examples" of 256×256, steps not given. See
  `configs/imagenet30.py` for what is taken.
- **ImageNet with "Wide-ResNet-28-2"**: FixMatch's 43.66 is TorchSSL's result of
  a ResNet-50, so that is the model here.
- **ImageNet with ViT-Base**: pre-training, optimizer, steps and resolution are
  not given. Such errors from 100 labels a class are plausible only after
  pre-training, so the commands ask for a file of weights; see
  `configs/imagenet.py`.
"""


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
