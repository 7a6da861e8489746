"""How the classes are told apart: confusion, errors, calibration."""

import numpy as np

from flatmatch_jax.report import charts
from flatmatch_jax.report.page import (
  Html,
  card,
  grid,
  join,
  note,
  scrolling,
  table,
  tag,
)
from flatmatch_jax.report.predictions import Predictions
from flatmatch_jax.training import classify

_MATRIX = 20  # Classes; more are told by the pairs most often confused.
_PAIRS = 20


def section(found: Predictions, names: list[str]) -> Html:
  report = found.report
  confusion = np.array(report['confusion'])
  errors = card(
    'Error by class',
    bars(names, report['class_errors'], 'error of each class'),
    note=f'Error, %; their mean is {report["balanced_error"]:.2f}.',
  )
  bins = classify.reliability(found.probabilities, found.labels)
  return join(
    note(
      f'{len(found.labels):,} {found.kind} images, by the averaged weights at '
      f'step {found.step:,}: error {report["error"]:.2f}%.'
    ),
    grid(
      matrix(confusion, names) if len(names) <= _MATRIX else None,
      pairs(confusion, names) if len(names) > _MATRIX else None,
      errors,
      charts.reliability(bins, report['calibration_error']),
    ),
  )


def matrix(confusion, names) -> Html:
  """Truth down, prediction across; colour is the share of the row."""
  shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
  # Long ones stand upright.
  kind = 'tall' if max(map(len, names)) > 3 else None
  head = [
    tag('th', tag('span', name, class_=kind, title=name), scope='col')
    for name in names
  ]
  rows = []
  for i, name in enumerate(names):
    cells = [
      tag(
        'td',
        confusion[i, j] or '',
        class_='right' if i == j else 'wrong',
        style=f'--share:{shares[i, j]:.3f}',
      )
      for j in range(len(names))
    ]
    rows.append(tag('tr', tag('th', name, scope='row', title=name), *cells))
  corner = tag('td', 'truth\u00a0↓ predicted\u00a0→')
  content = tag(
    'table',
    tag('thead', tag('tr', corner, *head)),
    tag('tbody', *rows),
    class_='matrix',
  )
  return card(
    'Confusion',
    scrolling('confusion matrix', content),
    note='Images of each class (rows) by what they were taken for (columns).',
    wide=len(names) > 10,
  )


def pairs(confusion, names) -> Html:
  wrong = confusion - np.diag(np.diagonal(confusion))
  order = np.argsort(-wrong, axis=None, kind='stable')[:_PAIRS]
  rows = [
    [names[i], names[j], int(wrong[i, j])]
    for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True)
    if wrong[i, j]
  ]
  return card(
    'Most often confused',
    table(['truth', 'taken for', 'images'], rows, 'confused classes'),
  )


def bars(names, values, label) -> Html:
  """One horizontal bar a class, in percent; None where there is none."""
  top = max([v for v in values if v is not None], default=0) or 1
  rows = []
  for name, value in zip(names, values, strict=True):
    share = 0 if value is None else value / top
    bar = tag('div', class_='fill', style=f'--share:{share:.4f}')
    text = '–' if value is None else f'{value:.1f}'
    cells = tag('td', bar), tag('td', text, class_='number')
    rows.append(tag('tr', tag('th', name, scope='row', title=name), *cells))
  return scrolling(label, tag('table', tag('tbody', *rows), class_='bars'))
