"""Tables of benchmarks in the pages of docs/."""

import pathlib

from flatmatch_jax.system import files
from flatmatch_jax.types import UserError


def put_between(path: pathlib.Path, marks: tuple[str, str], text: str) -> None:
  """Replaces what stands between two marks of a page."""
  begin, end = marks
  check_marks(path, marks)
  before, _, rest = path.read_text().partition(begin)
  _, _, after = rest.partition(end)
  with files.replacing(path, 'w') as file:
    file.write(f'{before}{begin}\n\n{text}\n\n{end}{after}')


def check_marks(path: pathlib.Path, marks: tuple[str, str]) -> None:
  """Raises UserError, before any work, where a page has no place for it."""
  begin, end = marks
  content = path.read_text() if path.is_file() else ''
  if end not in content.partition(begin)[2]:
    raise UserError(
      f'{path} has no lines {begin} and, below it, {end}: put them where the '
      'table shall stand.'
    )
