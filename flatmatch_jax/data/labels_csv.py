"""A CSV file that says which label each image has.

  path,label,split
  photos/a.jpg,cat,train
  photos/b.jpg,dog,test
  photos/c.jpg,,

The first line names the columns, in any order and with others among them;
`split` may be missing. An empty label is unknown, an empty split is train.
Columns are separated by commas, semicolons or tabs.
"""

import csv
import io
import os
import pathlib
from typing import NamedTuple
import unicodedata

from flatmatch_jax.system import files
from flatmatch_jax.types import UserError, shortened

_NAMES = {
  'path': ('path', 'file', 'filename', 'image'),
  'label': ('label', 'class'),
  'split': ('split',),
}
_SPLITS = ('train', 'test', 'val', 'valid', 'validation')
_MAX_BYTES = 2**28  # A million long paths take a third.


class Row(NamedTuple):
  """An image."""

  path: str
  label: str  # '' where unknown.
  split: str


def read(file: pathlib.Path) -> list[Row]:
  """The rows of a file; UserError names the first line that is wrong."""
  try:
    text = files.read_bytes(file, _MAX_BYTES).decode('utf-8-sig')
    delimiter = max(',;\t', key=text.partition('\n')[0].count)
    lines = io.StringIO(text, newline='')
    table = list(csv.reader(lines, delimiter=delimiter, strict=True))
  except (OSError, ValueError, csv.Error) as error:
    raise UserError(
      f'{file} cannot be read: {error}; save it as CSV in UTF-8.'
    ) from error
  columns = _columns(file, table[0] if table else [])
  rows: list[Row] = []
  seen: dict[str, int] = {}
  for number, cells in enumerate(table[1:], 2):
    if not any(cells):
      continue
    path, label, split = (_cell(cells, column) for column in columns)
    label = unicodedata.normalize('NFC', label)
    row = Row(path, label, split.lower() or 'train')
    reason = ''
    if not row.path or '\0' in row.path:
      reason = 'has no path'
    elif row.split not in _SPLITS:
      reason = f'has the split {shortened(row.split)}, not train, test or val'
    elif row.split != 'train' and not row.label:
      reason = f'is for the {row.split} set but has no label'
    elif (name := os.path.normpath(row.path)) in seen:
      reason = f'names {shortened(row.path)} as line {seen[name]} does'
    if reason:
      raise UserError(f'{file}: line {number} {reason}; correct that line.')
    seen[name] = number
    rows.append(row)
  return rows


def _columns(file, header) -> list[int | None]:
  """The numbers of the columns of path, label and split."""
  header = [name.strip().lower() for name in header]
  found = {
    wanted: next((header.index(x) for x in names if x in header), None)
    for wanted, names in _NAMES.items()
  }
  if found['path'] is None or found['label'] is None:
    raise UserError(
      f'{file}: the first line must name the columns path,label and perhaps '
      f'split, but is {shortened(",".join(header))}; add or rename them.'
    )
  return list(found.values())


def _cell(cells, column) -> str:
  there = column is not None and column < len(cells)
  return cells[column].strip() if there else ''
