"""Tables and curves of the study of CIFAR-10, from docs/results/."""

import contextlib
import json
import pathlib
import statistics

from scipy import stats

from benchmarks import pages
from flatmatch_jax.run import plots
from flatmatch_jax.system import files

_LAST = 5  # Evaluations whose median is shown.
_BASE = 'freematch'
_SHOWN = 6  # Of the runs that are missing.
MARKS = '<!-- tables -->', '<!-- end -->'


def summarize(folder: pathlib.Path, groups, done) -> list[dict]:
  """A row for every variant of the protocol with finished runs."""
  rows = []
  for (labels, variant), seeds in groups.items():
    lines = {
      seed: [
        json.loads(x) for x in _path(folder, name).read_text().splitlines()
      ]
      for seed, name in seeds.items()
      if name in done
    }
    errors = [content[-1]['error'] for content in lines.values()]
    if not errors:
      continue
    rows.append(
      {
        'protocol': 'cifar10_fast',
        'method': variant,
        'labels': labels,
        'seeds': sorted(lines),
        'error_mean': round(statistics.mean(errors), 2),
        'error_std': round(statistics.stdev(errors), 2)
        if len(errors) > 1
        else None,
        'core_hours': round(
          sum(content[0]['core_hours'] for content in lines.values()), 2
        ),
      }
    )
  return rows


def _path(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f'{name}.jsonl'


def read(folder: pathlib.Path) -> dict[str, list[dict]]:
  """The evaluations of every recorded run, by its name."""
  runs = {}
  for path in sorted(folder.glob('*.jsonl')):
    with contextlib.suppress(ValueError):  # A line that was cut off.
      rows = [json.loads(line) for line in path.read_text().splitlines()]
      runs[path.stem] = [row for row in rows if 'error' in row]
  return {name: rows for name, rows in runs.items() if rows}


def group(names: list[str]) -> dict[tuple[int, str], dict[int, str]]:
  """(labels, variant) -> seed -> name: methods first, then their variants."""
  groups: dict[tuple[int, str], dict[int, str]] = {}
  for name in names:
    method, labels, seed, *rest = name.split('-')
    variant = ', '.join([method, *(_words(part) for part in rest)])
    groups.setdefault((int(labels), variant), {})[int(seed)] = name
  return dict(sorted(groups.items(), key=lambda item: ',' in item[0][1]))


def _words(part: str) -> str:
  field, _, value = part.partition('=')
  return f'{value} {field}' if field == 'steps' else f'{field} {value}'


def numbers(rows: list[dict]) -> tuple[float, float, float]:
  """Test error in percent: last, median of the last evaluations, best."""
  errors = [row['error'] for row in rows]
  return errors[-1], statistics.median(errors[-_LAST:]), min(errors)


def spread(values: list[float]) -> str:
  if len(values) < 2:
    return f'{values[0]:.2f}'
  return f'{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}'


def difference(values: list[float]) -> str:
  """Mean of paired differences and its 95% interval, by Student's t."""
  mean = statistics.mean(values)
  if len(values) < 2:
    return f'{mean:+.2f}'
  error = statistics.stdev(values) / len(values) ** 0.5
  half = stats.t.ppf(0.975, len(values) - 1) * error
  return f'{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})'


def pooled(runs, groups) -> str:
  """FlatMatch minus FreeMatch, first averaged over numbers of labels.

  Both numbers of labels of a seed share images: they are not two draws.
  """
  paired: dict[int, list[float]] = {}
  for (labels, variant), seeds in groups.items():
    for seed, name in seeds.items() if variant == 'flatmatch' else ():
      if name in runs and (other := groups[labels, _BASE][seed]) in runs:
        gain = numbers(runs[name])[0] - numbers(runs[other])[0]
        paired.setdefault(seed, []).append(gain)
  if not paired:
    return ''
  return (
    'FlatMatch minus FreeMatch, of each seed the mean over its numbers of '
    f'labels: {difference([statistics.mean(x) for x in paired.values()])}. '
  )


def table(runs, groups, labels: int) -> str:
  """Markdown: a line for every variant at a number of labels.

  Methods are paired with FreeMatch, other layouts and ρ with their own method.
  """
  lines = [
    f'| {labels} labels | seeds | last | median of last {_LAST} | best | '
    'last, minus another on the same splits (95%) |',
    '|---|---|---|---|---|---|',
  ]
  for (number, variant), seeds in groups.items():
    done = {seed: runs[n] for seed, n in seeds.items() if n in runs}
    if number != labels or not done:
      continue
    method, *other = variant.split(', ')
    against = method if other else _BASE
    base = groups.get((labels, against), {})
    columns = zip(*(numbers(rows) for rows in done.values()), strict=True)
    paired = [
      numbers(rows)[0] - numbers(runs[base[seed]])[0]
      for seed, rows in done.items()
      if seed in base and base[seed] in runs and variant != _BASE
    ]
    versus = f'{difference(paired)} against {against}' if paired else '–'
    lines.append(
      f'| {variant} | {", ".join(map(str, sorted(done)))} | '
      + ' | '.join(spread(list(column)) for column in columns)
      + f' | {versus} |'
    )
  return '\n'.join(lines)


def write(
  records: pathlib.Path, docs: pathlib.Path, names: list[str], done: list[str]
) -> None:
  """Puts tables and missing runs between the marks of results.md.

  `names` are those of the protocol, of which the `done` have whole records.
  """
  found, groups = read(records), group(names)
  runs = {name: found[name] for name in done}
  missing = [name for name in names if name not in runs]
  started = {
    labels
    for (labels, _), seeds in groups.items()
    for name in seeds.values()
    if name in runs
  }
  amount = sorted(started)
  tables = [
    f'{table(runs, groups, labels)}\n\n'
    f'![Test error by step, {labels} labels](images/results_{labels}.png)'
    for labels in amount
  ]
  text = pooled(runs, groups)
  text += f'{len(runs)} of the {len(names)} runs are done.'
  if missing:
    text += f' The next are {", ".join(missing[:_SHOWN])}.'
  if others := sorted(set(found) - set(names)):
    text += f' Not of the protocol, and not shown: {", ".join(others)}.'
  with files.replacing(records / 'summary.json', 'w') as file:
    json.dump(summarize(records, groups, set(done)), file, indent=1)
    file.write('\n')
  pages.put_between(docs / 'results.md', MARKS, '\n\n'.join([*tables, text]))
  for labels in amount:
    curves = {
      variant: [runs[name] for name in seeds.values() if name in runs]
      for (number, variant), seeds in groups.items()
      if number == labels and ',' not in variant
    }
    shown = {variant: rows for variant, rows in curves.items() if rows}
    plots.comparison(shown, docs / 'images' / f'results_{labels}.png')
