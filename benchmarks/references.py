"""Makes flatmatch_jax/run/references.json from finished runs.

  python benchmarks/references.py RUN…

Runs that differ in seeds only become one entry, with the test errors of each
at five steps. What the file has of other seeds and settings stays. An entry
needs at least three seeds. A folder of runs, such as a sweep's, is all of them.
"""

import argparse
import itertools
import json
import pathlib
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flatmatch_jax.report.runs import members
from flatmatch_jax.run import reference
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, files
from flatmatch_jax.types import UserError


class Finished(NamedTuple):
  """What an entry needs to know of a run."""

  name: str
  settings: dict
  images: str  # The fingerprint of the data.
  seed: int
  errors: dict[int, float]  # Of the test set, by step.

  @property
  def key(self) -> str:
    return _key(self.settings, self.images)


def _key(*parts) -> str:
  return json.dumps(parts, sort_keys=True)


def of_workdir(run: Workdir) -> Finished:
  return Finished(
    str(run.path),
    reference.settings(run.read('config.json')),
    run.read('dataset.json')['fingerprint'],
    run.read('result.json')['seed'],
    {row['step']: row['error'] for row in run.metrics() if 'error' in row},
  )


def entry(runs: list[Finished], old: dict | None = None) -> dict:
  """Errors of `runs`, which differ in seeds, and of the `old` entry's."""
  found: dict[int, dict[int, float]] = {}
  if old:
    for number, seed in enumerate(old['seeds']):
      rows = old['errors'].items()
      found[seed] = {int(step): errors[number] for step, errors in rows}
  given: dict[int, Finished] = {}
  for run in runs:
    if run.seed in given:
      raise UserError(
        f'{given[run.seed].name} and {run.name} have both the seed {run.seed}, '
        'and would count as one; give one of them.'
      )
    given[run.seed] = run
  found |= {seed: run.errors for seed, run in given.items()}
  steps = sorted(set.intersection(*map(set, found.values())))
  if len(steps) < reference.POINTS:
    raise UserError(
      f'{runs[0].name} and the other seeds of its setting were evaluated at '
      f'{len(steps)} common steps, and {reference.POINTS} are needed; train '
      'with the same config.eval_every.'
    )
  steps = _spread(steps)
  return {
    'settings': runs[0].settings,
    'images': runs[0].images,
    'seeds': sorted(found),
    'errors': {
      str(step): [round(found[seed][step], 2) for seed in sorted(found)]
      for step in steps
    },
  }


def _spread(steps: list[int]) -> list[int]:
  """Five of them, evenly; the last is always one."""
  points = range(1, reference.POINTS + 1)
  return [steps[round(len(steps) * k / len(points)) - 1] for k in points]


def update(paths: list[str], file: pathlib.Path) -> None:
  """Enters the runs at `paths` into `file`."""
  runs = []
  for member in itertools.chain.from_iterable(map(members, paths)):
    run = Workdir(member)
    if run.has('config.json') and not run.has('result.json'):
      print(f'{member}: not finished, so left out.')
    else:
      runs.append(of_workdir(run))
  enter(runs, file)


def enter(runs: list[Finished], file: pathlib.Path) -> None:
  """Makes entries of `runs` in `file`, or adds their seeds to what it has."""
  groups: dict[str, list[Finished]] = {}
  for run in runs:
    groups.setdefault(run.key, []).append(run)
  try:
    known = {
      _key(old['settings'], old['images']): old
      for old in (json.loads(file.read_text()) if file.exists() else [])
    }
  except (ValueError, TypeError, KeyError) as error:
    raise UserError(
      f'{file} is damaged ({error!r}); put it back as it was.'
    ) from error
  for key, alike in groups.items():
    new = entry(alike, known.get(key))
    if (number := len(new['seeds'])) < reference.LEAST_SEEDS:
      least = reference.LEAST_SEEDS
      print(f'{alike[0].name}: {number} of {least} seeds, so left out.')
      continue
    known[key] = new
    dataset, method = (new['settings'][name] for name in ('dataset', 'method'))
    seeds = ', '.join(map(str, new['seeds']))
    print(f'{method} on {dataset}: seeds {seeds}.')
  # A line each, so that a change shows what it changes.
  lines = ',\n'.join(json.dumps(known[key]) for key in sorted(known))
  with files.replacing(file, 'w') as out:
    out.write(f'[\n{lines}\n]\n')
  print(f'{len(known)} settings in {file.name}.')


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', nargs='+', metavar='RUN')
  update(parser.parse_args().runs, reference.FILE)


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
