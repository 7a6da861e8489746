"""The page of one run."""

import datetime
import shlex

import numpy as np

from flatmatch_jax.report import (
  analyses,
  charts,
  classes,
  diagnosis,
  gallery,
  next_steps,
  reproduce,
)
from flatmatch_jax.report.advice import Advice
from flatmatch_jax.report.page import (
  Html,
  card,
  document,
  grid,
  join,
  note,
  scrolling,
  table,
  tag,
)
from flatmatch_jax.report.predictions import Predictions
from flatmatch_jax.report.runs import RunFiles
from flatmatch_jax.run import reference, results
from flatmatch_jax.run.panels import PANELS, series
from flatmatch_jax.run.settings import flatten
from flatmatch_jax.step import recipes
from flatmatch_jax.types import UserError

# Drawn elsewhere, or the same as another but for rare classes.
_ELSEWHERE = ('step', 'class_histogram', 'balanced_error', 'val_balanced_error')
_RECENT = 10  # Rows of metrics.jsonl that a histogram is the mean of.


def render(
  run: RunFiles,
  found: Predictions | None,
  reason: str = '',
  advice: Advice | None = None,
) -> str:
  """The page. Without predictions the `reason` is told instead."""
  config = run.config
  title = f'{config["method"]} on {run.data}, {run.labels} labels'
  findings = diagnosis.diagnose(run, found.pixels_error if found else None)
  sections = {
    'Summary': join(diagnosis.section(findings), summary(run, found)),
    'Curves': curves(run),
    'Predictions': note(f'There are none: {reason}') if reason else Html(''),
    'Examples': Html(''),
    'Augmentations': Html(''),
    'Analyses': analyses.of_run(run.files.path),
    'What next?': next_steps.section(run, advice, found),
    'Configuration': configuration(run),
  }
  if found:
    names = run.dataset['class_names']
    sections['Predictions'] = classes.section(found, names)
    sections['Examples'] = gallery.examples(found, names)
    sections['Augmentations'] = gallery.augmentations(found)
  status = diagnosis.status(run, findings)
  return document(title, header(run, title, status), sections)


def header(run: RunFiles, title: str, status: Html) -> Html:
  config = run.config
  images = f'{config["batch_size"]}'
  if recipes.parse(str(config['method'])).method != 'supervised':
    images += f' + {config["unlabeled_batch_size"]}'
  facts = (
    f'{config["model"]} · seed {config["seed"]}, labels drawn with '
    f'seed {config["split_seed"]} · {config["steps"]:,} steps of {images} '
    'images'
  )
  if counts := run.dataset:
    facts += (
      f' · {run.labels} labeled, {counts["num_unlabeled"]:,} unlabeled and '
      f'{counts["num_test"]:,} test images'
    )
  return tag(
    'header',
    tag('h1', title),
    tag(
      'p',
      status,
      facts,
    ),
  )


def summary(run: RunFiles, found: Predictions | None) -> Html:
  result, tiles = run.result, []
  percent = lambda value: f'{value:.2f}%'
  for key, kind in (('error', 'test'), ('val_error', 'validation')):
    for end, value in results.shown(result, key).items():
      tiles.append((f'{kind} error, {end}', percent(value)))
  if 'error_selected' in result:
    label = 'test error where validation is best'
    tiles.append((label, percent(result['error_selected'])))
  if found and found.pixels_error is not None:
    label = f'{found.kind} error of logistic regression on thumbnails'
    tiles.append((label, percent(found.pixels_error)))
  if found:
    error = percent(found.report['calibration_error'])
    tiles.append((f'calibration error, {found.kind}', error))
  if run.finished:
    took = datetime.timedelta(seconds=round(result['seconds']))
    tiles.append(('time, h:mm:ss', str(took)))
    speed = result['images_per_second']
    tiles.append(('training images per second', f'{speed or 0:,.0f}'))
  else:
    tiles.append(('steps so far', f'{run.step:,}'))
  fair = 'choice needs validation images (num_val)'
  if 'val_error_best' in result and 'error_best' not in result:
    fair = 'estimate needs test images'
  cells = [
    tag('div', tag('dt', name), tag('dd', value)) for name, value in tiles
  ]
  return join(
    tag('dl', *cells, class_='tiles'),
    note(
      'Errors are those of the averaged weights. “Best” is the lowest that '
      f'was seen on these images, as published code reports it; a fair {fair}.'
    ),
  )


def curves(run: RunFiles) -> Html:
  rows, known = run.rows, set(_ELSEWHERE)
  panels = []
  for panel in PANELS:
    known |= panel.lines.keys()
    lines = [_line(rows, key, name) for key, name in panel.lines.items()]
    if 'error' in panel.lines:
      lines += _expected(run)
    panels.append(charts.curves(panel.title, lines, panel.unit))
  for key in dict.fromkeys(key for row in rows for key in row):
    # Such as the number of skipped steps, which is hoped to stay zero.
    if key not in known and any(row.get(key) for row in rows):
      name = key.replace('_', ' ')
      line = _line(rows, key, name)
      panels.append(charts.curves(name.capitalize(), [line], name))
  return grid(*panels, histogram(run))


def _line(rows, key, name):
  return charts.Line(name, *series(rows, key))


def _expected(run):
  """Where runs of other seeds let expect the test error, if there are any."""
  bands = reference.find(run.config, run.dataset.get('fingerprint', ''))
  if not bands:
    return []
  column = lambda name: [getattr(band, name) for band in bands.values()]
  return [
    charts.Line(
      'expected by earlier runs',
      list(bands),
      y=column('mean'),
      low=column('low'),
      high=column('high'),
    )
  ]


def histogram(run: RunFiles) -> Html:
  """The classes of pseudo-labels, used or not."""
  rows = [r['class_histogram'] for r in run.rows if r.get('class_histogram')]
  if not rows or 'class_names' not in run.dataset:
    return Html('')
  recent = rows[-_RECENT:]
  shares = 100 * np.mean(recent, axis=0)
  names = run.dataset['class_names']
  return card(
    'Pseudo-labels by class',
    classes.bars(names, shares, 'share of the pseudo-labels'),
    note=(
      f'Share of the guesses, %: mean of the last {len(recent)} logged steps; '
      f'equal shares would be {100 / len(names):.1f}.'
    ),
  )


def configuration(run: RunFiles) -> Html:
  try:
    again = reproduce.command(run.config, 'runs/again')
  except UserError as error:
    again = f'# {error}'
  lines = [again, f'python -m flatmatch_jax.report --workdir {_quoted(run)}']
  items = lambda pairs: [[key, str(value)] for key, value in pairs.items()]
  return join(
    tag('h3', 'Command to reproduce'),
    scrolling('commands', tag('pre', '\n'.join(lines))),
    grid(
      card(
        'Fields',
        table(
          ['field', 'value'],
          items(flatten(run.config)),
          'configuration',
        ),
      ),
      card(
        'Versions',
        table(['package', 'version'], items(run.versions), 'versions'),
      ),
    ),
  )


def _quoted(run):
  return shlex.quote(str(run.files.path))
