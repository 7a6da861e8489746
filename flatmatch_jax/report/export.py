"""The table of a comparison for spreadsheets and papers."""

import csv
import io

from flatmatch_jax.report.comparison import (
  Group,
  columns,
  mean_and_deviation,
  paper_error,
)

_SPECIAL = {c: f'\\{c}' for c in '&%$#_{}'} | {
  '\\': r'\textbackslash{}',
  '~': r'\textasciitilde{}',
  '^': r'\textasciicircum{}',
}


def as_csv(groups: list[Group]) -> str:
  errors = columns(groups)
  out = io.StringIO()
  writer = csv.writer(out, lineterminator='\n')
  head = ['dataset', 'labels', 'method', 'settings', 'runs', 'unfinished']
  head += ['seeds', 'steps']
  for key in errors:
    head += [f'{key}_mean', f'{key}_std']
  writer.writerow([*head, 'paper_full_runs'])
  for group in groups:
    done = len(group.finished)
    row: list = [group.data, group.labels, group.method, group.settings, done]
    row += [len(group.runs) - done, group.seeds, group.runs[0].config['steps']]
    for key in errors:
      values = group.values(key)
      row += mean_and_deviation(values) if values else (None, None)
    writer.writerow([*row, paper_error(group)])
  return out.getvalue()


def as_latex(groups: list[Group]) -> str:
  """A tabular for the package booktabs."""
  errors = columns(groups)
  papers = [paper_error(group) for group in groups]
  head = ['dataset', 'labels', 'method', 'runs', *errors.values()]
  if any(papers):
    head.append('paper, full runs')
  lines = [
    '% Test error in percent, mean and standard deviation over runs.',
    rf'\begin{{tabular}}{{lrl{"r" * (len(head) - 3)}}}',
    r'\toprule',
    _row(map(_plain, head)),
    r'\midrule',
  ]
  for group, paper in zip(groups, papers, strict=True):
    names = [group.data, group.labels, group.name, len(group.finished)]
    cells = [_plain(name) for name in names]
    cells += [_number(group.values(key)) for key in errors]
    if any(papers):
      cells.append(
        f'${paper.replace("±", chr(92) + "pm ")}$' if paper else '--'
      )
    lines.append(_row(cells))
  lines += [r'\bottomrule', r'\end{tabular}']
  return '\n'.join(lines) + '\n'


def _row(cells):
  return f'{" & ".join(cells)} \\\\'


def _plain(text):
  return ''.join(_SPECIAL.get(c, c) for c in str(text))


def _number(values):
  if not values:
    return '--'
  mean, deviation = mean_and_deviation(values)
  return f'${mean:.2f}' + (
    '$' if deviation is None else rf' \pm {deviation:.2f}$'
  )
