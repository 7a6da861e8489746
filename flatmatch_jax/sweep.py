"""One run for many seeds and settings, each with an ordinary workdir.

  python -m flatmatch_jax.sweep --config configs/digits.py \\
    --workdir runs/sweep --seeds 0,1,2 --set recipe_args.rho=0.01,0.05,0.1

Every combination is a member, with a folder in --workdir. Members that differ
in seeds and in numbers that a step can take as arrays share one compiled
program, and --at_once of them train side by side. Others, such as those with
another network, come group after group; runs that stream their images or fix
labels one after another.
"""

from collections.abc import Callable
import contextlib
import itertools
import shlex
import statistics
from typing import Any, NamedTuple

from absl import app, flags
import jax
from ml_collections import config_flags

from flatmatch_jax import data as data_lib
from flatmatch_jax.run import watch
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, files, messages, startup
from flatmatch_jax.system.files import to_path
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import fixed_labels, loop, setup, stacked, traced
from flatmatch_jax.types import UserError

# Fields that nothing but the compiled step reads. Whether it can take them as
# arrays is tried out.
_OF_THE_STEP = (
  'method_args.',
  'recipe_args.',
  'learning_rate',
  'weight_decay',
  'layer_decay',
  'ema_decay',
  'bn_momentum',
)
_SEEDS = ('seed', 'split_seed')


class Member(NamedTuple):
  """One run of a sweep."""

  config: Any
  files: Workdir
  settings: dict[str, Any]  # What distinguishes it, by the config's fields.


def sweep(
  config, workdir: str, settings: dict[str, list], at_once: int | None = None
) -> list[Member]:
  """Trains for all combinations of `settings`, lists by field of the config.

  'seeds' are the seed and the split_seed, so that each has labels of its own.
  `at_once` members train side by side: by default all; on CPU, where vmapped
  convolutions are slower than one after another, one on each device.
  Returns the members, whose folders hold finished runs but where the numbers
  were not finite `config.max_skipped` times in a row: these are named.
  """
  if jax.process_count() > 1:
    raise UserError('A sweep runs in one process; start one without others.')
  if at_once is not None and at_once < 1:
    raise UserError(f'--at_once={at_once} must be at least 1.')
  members = combine(config, workdir, settings)
  for member in members:
    config_lib.check(member.config)
    member.files.check_config(member.config)
  startup.use_compilation_cache(config.compilation_cache)
  left = [m for m in members if not m.files.has('result.json')]
  messages.say(
    f'{len(members)} members in {workdir}, {len(members) - len(left)} of them '
    'finished before.'
  )
  names = [name for name in settings if name.startswith(_OF_THE_STEP)]
  for group in _grouped(left, lambda member: _others(member, names)):
    _train_group(group, names, at_once)
  return members


def combine(config, workdir: str, settings: dict[str, list]) -> list[Member]:
  """The members: all combinations; the last setting varies fastest."""
  known = ['seeds', *cli.fields(config)]
  for name, values in settings.items():
    if name not in known:
      raise UserError(
        f'The config has no field {name!r} to sweep over. Known fields: '
        f'{", ".join(known)}.'
      )
    if len({_read(config, name, v) for v in values}) < max(1, len(values)):
      raise UserError(
        f'{name}={",".join(map(str, values))} must be a list of values, each '
        'once.'
      )
  if twice := [name for name in _SEEDS if {name, 'seeds'} <= set(settings)]:
    raise UserError(
      f'seeds set the seed and the split_seed; leave out {twice[0]}, or set '
      'both by themselves.'
    )
  members = []
  for row in itertools.product(*settings.values()):
    chosen = {
      name: _read(config, name, value)
      for name, value in zip(settings, row, strict=True)
    }
    name = '-'.join(f'{n.split(".")[-1]}={v}' for n, v in chosen.items())
    if 'seeds' in chosen:
      chosen |= dict.fromkeys(_SEEDS, chosen.pop('seeds'))
    folder = Workdir(str(to_path(workdir) / name.replace('/', '_')))
    members.append(Member(traced.changed(config, chosen), folder, chosen))
  return members


def _read(config, name, value):
  """The value, or its text, as the field's type."""
  kind = type(traced.get(config, 'seed' if name == 'seeds' else name))
  try:
    if kind is bool:
      return {'true': True, 'false': False}[str(value).lower()]
    if kind in (int, float, str):
      return kind(str(value))
  except (ValueError, KeyError):
    pass
  raise UserError(
    f'{name}={value} cannot be swept over: it is no {kind.__name__}, or the '
    'field is more than one number or word.'
  )


def _grouped(members: list, key: Callable) -> list[list]:
  """Members with equal keys together, in the order they first appear."""
  groups: dict = {}
  for member in members:
    groups.setdefault(key(member), []).append(member)
  return list(groups.values())


def _others(member, names):
  """The values of settings other than the seeds and `names`."""
  apart = {*names, *_SEEDS}
  return tuple(v for n, v in member.settings.items() if n not in apart)


def _train_group(members: list[Member], names, at_once) -> None:
  """Members that have at least the data in common."""
  config = members[0].config
  dataset = data_lib.from_config(config)
  shared = data_lib.pipeline_of(dataset).shared
  pairs = []
  for member in members:
    split = setup.choose_split(member.config, dataset)
    # Whether labels are fixed depends on settings that no step reads.
    fixes = fixed_labels.step_of_fixing(member.config, len(split.labeled))
    if shared and not fixes:
      pairs.append((member, split))
      continue
    try:
      loop.train_and_evaluate(member.config, str(member.files.path))
    except watch.NotFiniteError as error:
      messages.say(f'{member.files.path.name}: {error}')
  if not pairs:
    return
  can = traced.traceable(pairs[0][0].config, names, dataset, pairs[0][1])
  if one_by_one := [name for name in names if name not in can]:
    messages.say(
      f'{", ".join(one_by_one)} decides what is compiled: other values are '
      'other programs, one after another.'
    )
  key = lambda pair: (*_others(pair[0], can), setup.info_of(dataset, pair[1]))
  for group in _grouped(pairs, key):
    same, their_splits = zip(*group, strict=True)
    with contextlib.ExitStack() as locks:
      for member in same:
        locks.enter_context(member.files.lock())
      stacked.train_all(same, their_splits, dataset, can, at_once)


def stopped(members: list[Member]) -> list[Member]:
  """Those that a sweep left without a result: their numbers broke."""
  return [m for m in members if not m.files.has('result.json')]


def describe(members: list[Member]) -> str:
  """A line for each setting: the last errors, over its seeds."""
  lines = []
  for group in _grouped(members, lambda member: _others(member, ())):
    out = stopped(group)
    found = [m.files.read('result.json') for m in group if m not in out]
    key = 'val_error_last'
    if any('error_last' in result for result in found):
      key = 'error_last'
    errors = [result[key] for result in found if key in result]
    text = ', '.join(f'{error:.2f}' for error in errors) or 'not measured'
    if len(errors) > 1:
      spread = statistics.stdev(errors)
      text = f'{statistics.mean(errors):.2f} ± {spread:.2f} ({text})'
    if out:
      text += f'; stopped: {", ".join(m.files.path.name for m in out)}'
    chosen = group[0].settings.items()
    name = ' '.join(f'{n}={v}' for n, v in chosen if n not in _SEEDS)
    lines.append(f'{name or group[0].config.method}: {key} {text}')
  return '\n'.join(lines)


def read_settings(items: list[str], seeds: list[str]) -> dict[str, list]:
  """What --set and --seeds say, as lists of texts by field."""
  settings: dict[str, list] = {}
  for item in items:
    name, equals, values = item.removeprefix('config.').partition('=')
    if not equals or name in settings:
      raise UserError(
        f'Cannot read --set {item}: write FIELD=VALUE,VALUE,…, and each field '
        'once.'
      )
    settings[name] = values.split(',')
  return settings | ({'seeds': seeds} if seeds else {})


def define_flags(values: flags.FlagValues) -> None:
  """Of the command; not at import, as the function needs none."""
  to: Any = {'flag_values': values}
  config_flags.DEFINE_config_file(
    'config', None, 'File of the config, with :key=value,… behind it.', **to
  )
  flags.DEFINE_string(
    'workdir', None, 'Folder of the sweep; each member has one in it.', **to
  )
  flags.DEFINE_list(
    'seeds', [], 'Seeds, such as 0,1,2: of training, and of the split.', **to
  )
  text = 'FIELD=VALUE,VALUE,… of the config; may be given several times.'
  flags.DEFINE_multi_string('set', [], text, **to)
  text = 'Members that train side by side; fewer need less memory.'
  flags.DEFINE_integer('at_once', None, text, **to)


def main(argv):
  del argv
  values = flags.FLAGS
  settings = read_settings(values.set, values.seeds)
  if not (values.config and values.workdir and settings):
    raise UserError(
      'A sweep needs --config FILE.py, --workdir DIR and --seeds or --set, '
      'such as --config configs/digits.py --workdir runs/sweep --seeds 0,1,2.'
    )
  startup.use_cores(values.config)
  members = sweep(values.config, values.workdir, settings, values.at_once)
  text = describe(members)
  print(text)
  table = to_path(values.workdir) / 'table.txt'
  with files.replacing(table, mode='w', encoding='utf-8') as file:
    file.write(f'{text}\n')
  messages.say(
    f'This table is in {table}. For curves and a page: python -m '
    f'flatmatch_jax.report --workdir {shlex.quote(values.workdir)}'
  )
  if out := stopped(members):
    raise UserError(
      f'{len(out)} of {len(members)} members have no result, because their '
      f'numbers were not finite more than config.max_skipped='
      f'{values.config.max_skipped} steps in a row: '
      f'{", ".join(m.files.path.name for m in out)}. The others are done.'
    )


if __name__ == '__main__':
  with cli.errors_as_lines():
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=cli.parse_flags)
