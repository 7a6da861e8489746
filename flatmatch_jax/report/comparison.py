"""The page of several runs: means over seeds, side by side."""

import collections
import statistics
from typing import NamedTuple

from flatmatch_jax.paper import cells
from flatmatch_jax.paper.tables import TABLES
from flatmatch_jax.report import analyses, charts
from flatmatch_jax.report.page import (
  Html,
  alarm,
  data_uri,
  document,
  grid,
  join,
  note,
  table,
  tag,
)
from flatmatch_jax.report.runs import RunFiles
from flatmatch_jax.run.panels import PANELS, series
from flatmatch_jax.run.settings import differences
from flatmatch_jax.step import recipes
from flatmatch_jax.system.files import common_folder

ERRORS = {
  'error_last': 'last',
  'error_median20': 'median of last 20 at most',
  'error_best': 'best',
  'error_selected': 'at best validation',
  'val_error_last': 'validation, last',
  'val_error_median20': 'validation, median of last 20 at most',
  'val_error_best': 'validation, best',
}


class Group(NamedTuple):
  """Runs that differ in seeds only."""

  data: str
  labels: int | str
  method: str
  settings: str  # In which it differs from others of the same three.
  runs: list[RunFiles]

  @property
  def finished(self) -> list[RunFiles]:
    return [run for run in self.runs if run.finished]

  @property
  def name(self) -> str:
    return f'{self.method}, {self.settings}' if self.settings else self.method

  def values(self, key: str) -> list[float]:
    """An error of each finished run that has it."""
    return [run.result[key] for run in self.finished if key in run.result]

  @property
  def seeds(self) -> str:
    return ', '.join(str(run.config['seed']) for run in self.finished)


def group(runs: list[RunFiles]) -> list[Group]:
  """By dataset, labels and method, and by what else differs among those."""
  alike = collections.defaultdict(list)
  for run in sorted(runs, key=lambda run: (run.data, _order(run.labels))):
    alike[run.data, run.labels, run.config['method']].append(run)
  groups = []
  for (data, labels, method), members in alike.items():
    texts = differences([_settings(run) for run in members])
    parts = collections.defaultdict(list)
    for run, text in zip(members, texts, strict=True):
      parts[text].append(run)
    for settings, part in parts.items():
      part.sort(key=lambda run: (run.config['seed'], run.config['split_seed']))
      groups.append(Group(data, labels, method, settings, part))
  return groups


def _order(labels):
  """Numbers before 'all'."""
  return isinstance(labels, str), labels


def _settings(run):
  return run.config | {'images': run.dataset.get('fingerprint')}


def mean_and_deviation(values: list[float]) -> tuple[float, float | None]:
  """The deviation is that of a sample, n − 1; of one value there is none."""
  deviation = statistics.stdev(values) if len(values) > 1 else None
  return statistics.mean(values), deviation


def spread(values: list[float]) -> str:
  """For people: 2.41 ± 0.32."""
  if not values:
    return '–'
  mean, deviation = mean_and_deviation(values)
  return f'{mean:.2f}' if deviation is None else f'{mean:.2f} ± {deviation:.2f}'


def paper_error(group: Group) -> str:
  """What the paper prints for dataset, labels and method; '' if nothing."""
  config = group.runs[0].config
  method = recipes.parse(group.method)
  wanted = 'all' if config['labels'] == 'all' else str(group.labels)
  if 'model' in config['variant']:
    wanted += f',model={config["variant"]["model"]}'
  for name in TABLES:
    for cell in cells.runs(name):
      same = cell.dataset == config['dataset'] and cell.labels == wanted
      if same and recipes.parse(cell.method) == method:
        return cell.error
  return ''


def columns(groups: list[Group]) -> dict[str, str]:
  """The errors that any of the runs has, and their titles."""
  return {
    key: title
    for key, title in ERRORS.items()
    if any(group.values(key) for group in groups)
  }


def render(groups: list[Group], files: dict[str, str]) -> str:
  """The page; `files` are the table in other formats, by their names."""
  runs = [run for group in groups for run in group.runs]
  unfinished = sum(not run.finished for run in runs)
  title = f'{len(runs)} runs on {_listed(group.data for group in groups)}'
  words = f'{len(groups)} settings, {len(runs) - unfinished} finished runs'
  if unfinished:
    words += f', {unfinished} unfinished'
  header = tag('header', tag('h1', title), tag('p', words))
  sections = {
    'Results': results(groups, files),
    'Curves': curves(groups),
    'Analyses': analyses.of_several(run.files.path for run in runs),
    'Runs': every_run(groups),
  }
  return document(title, header, sections)


def _listed(names):
  return ', '.join(dict.fromkeys(names))


def results(groups: list[Group], files: dict[str, str]) -> Html:
  errors, papers = columns(groups), [paper_error(group) for group in groups]
  head = ['method', 'dataset', 'labels', 'runs', 'steps']
  head += [f'{title}, %' for title in errors.values()]
  if any(papers):
    head.append('paper, full runs, %')
  rows: list[list] = []
  for group, paper in zip(groups, papers, strict=True):
    row: list = [group.name, group.data, group.labels, _count(group)]
    steps = group.runs[0].config['steps']
    row.append((f'{steps:,}', steps))
    for key in errors:
      values = group.values(key)
      mean = mean_and_deviation(values)[0] if values else ''
      row.append((spread(values), mean))
    if any(papers):
      row.append((paper.replace('±', ' ± ') or '–', _leading(paper)))
    rows.append(row)
  links = [
    tag(
      'a', f'Download {name}', download=name, href=data_uri(kind, text.encode())
    )
    for (name, text), kind in zip(
      files.items(), ('text/csv', 'text/x-tex'), strict=True
    )
  ]
  words = (
    'Errors in percent, of test images where nothing else is said: mean ± '
    'standard deviation (n − 1) of the finished runs. “Best” looks at the very '
    'images to choose; compare by “last” or “median”.'
  )
  if any(papers):
    words += (
      ' The paper’s column is of its full runs, of a million steps and more: '
      'shorter runs are not to be measured by it.'
    )
  return join(
    below_supervised(groups),
    note(words),
    table(head, rows, 'results', sortable=True),
    tag('p', *links, class_='downloads'),
  )


def below_supervised(groups: list[Group]) -> Html:
  """Names those that are worse than supervised training on the same labels."""
  last = lambda group: (
    group.values('error_last') or group.values('val_error_last')
  )
  known = [group for group in groups if last(group)]
  plain = {
    (group.data, group.labels): last(group)
    for group in known
    if group.method == 'supervised'
  }
  parts = []
  for member in known:
    base = plain.get((member.data, member.labels))
    guesses = recipes.parse(member.method).method != 'supervised'
    if (
      base and guesses and statistics.mean(last(member)) > statistics.mean(base)
    ):
      parts.append(
        f'{member.name} on {member.data}, {member.labels} labels: '
        f'{spread(last(member))}% against {spread(base)}%.'
      )
  remedy = (
    'Its pseudo-labels do harm. Train it for more steps, try a higher '
    'threshold or a lower config.learning_rate, or take another method.'
  )
  title = 'Worse than supervised training on the same labels'
  return alarm(title, parts, [remedy])


def _count(group):
  done, all_ = len(group.finished), len(group.runs)
  shown = f'{done}' if done == all_ else f'{done} (+ {all_ - done} unfinished)'
  return shown, done


def _leading(error):
  return float(error.split('±')[0]) if error else ''


def curves(groups: list[Group]) -> Html:
  """Overlaid where datasets and labels are the same."""
  alike = collections.defaultdict(list)
  for member in groups:
    alike[member.data, member.labels].append(member)
  parts = []
  for (data, labels), members in alike.items():
    panels = [
      charts.curves(
        title, [_mean_line(g, key) for g in members], panel.unit, False
      )
      for panel in PANELS
      for key, title in panel.compared.items()
    ]
    if any(panels):
      names = [
        charts.Line(member.name, [], [], color=i)
        for i, member in enumerate(members)
      ]
      parts += [tag('h3', f'{data}, {labels} labels'), charts.legend(names)]
      parts.append(grid(*panels))
  if not parts:
    return Html('')
  return join(
    note('Lines are means over runs, bands from the lowest to the highest.'),
    *parts,
  )


def _mean_line(group: Group, key: str) -> charts.Line:
  """Of the finished runs, if there are any, at the steps they share."""
  runs = group.finished or group.runs
  tables = [dict(zip(*series(run.rows, key), strict=True)) for run in runs]
  tables = [values for values in tables if values]
  if not tables:
    return charts.Line(group.name, [], [])
  steps = [s for s in tables[0] if all(t.get(s) is not None for t in tables)]
  values = [[t[step] for t in tables] for step in steps]
  low, high = [list(map(f, values)) for f in (min, max)]
  mean = list(map(statistics.fmean, values))
  band = (low, high) if len(tables) > 1 else (None, None)
  return charts.Line(group.name, steps, mean, *band)


def every_run(groups: list[Group]) -> Html:
  rows: list[list] = []
  parents = [run.files.path.parent for g in groups for run in g.runs]
  base = common_folder(parents)
  for member in groups:
    for run in member.runs:
      folder = run.files.path.relative_to(base)
      row: list = [folder, member.name, member.data, member.labels]
      row += [run.config['seed'], run.status]
      for key in ('error_last', 'error_best'):
        value = run.result.get(key)
        row.append(('–', '') if value is None else (f'{value:.2f}', value))
      seconds = run.result.get('seconds')
      row.append(('–', '') if seconds is None else (f'{seconds:,.0f}', seconds))
      rows.append(row)
  head = ['folder', 'method', 'dataset', 'labels', 'seed', 'state']
  head += ['last error, %', 'best error, %', 'time, s']
  return join(
    note(f'Folders are those in {base}.'),
    table(head, rows, 'runs', sortable=True),
  )
