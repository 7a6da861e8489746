"""What was done to the files of a folder, as lines of JSON.

  {"moves": [["unlabeled/a.jpg", "labeled/cat/a.jpg"], …]}
  {"skip": ["unlabeled/b.jpg", …]}
  {"undo": 0}      the action of that number, counted from 0

A line is on disk before its files move. After a crash an image is in one of
its two places, and looking there tells whether the line holds.
"""

import contextlib
import fcntl
import json
import os
import pathlib
from typing import Any, NamedTuple

from flatmatch_jax.data import cache
from flatmatch_jax.system import files
from flatmatch_jax.types import UserError

FILE = f'{cache.FOLDER}/labels.jsonl'
LABELED = 'labeled'

_MAX_BYTES = 2**28


class Action(NamedTuple):
  """What one key did. Paths are relative to the folder."""

  moves: list[tuple[str, str]]  # From, to.
  skipped: list[str]


class Journal:
  """Open for one process at a time."""

  def __init__(self, root: pathlib.Path):
    path = root / FILE
    with files.writing(path):
      path.parent.mkdir(exist_ok=True)
      flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
      self._file = os.open(path, flags, 0o666)
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self.close()
      raise UserError(
        f'{root} is being labeled by another process; use its page, or stop it '
        'first.'
      ) from None
    self._number = 0

  def close(self) -> None:
    os.close(self._file)

  def read(self) -> dict[int, Action]:
    """Earlier actions by number. Lines that make no sense are passed over."""
    content = os.pread(self._file, _MAX_BYTES, 0)
    if content and not content.endswith(b'\n'):  # Torn by a crash.
      os.ftruncate(self._file, content.rfind(b'\n') + 1)
    actions = {}
    for line in content.split(b'\n'):
      match _parse(line):
        case {'moves': [*pairs]} if all(map(_is_move, pairs)):
          actions[self._number] = Action([(a, b) for a, b in pairs], [])
          self._number += 1
        case {'skip': [*paths]} if all(isinstance(p, str) for p in paths):
          actions[self._number] = Action([], paths)
          self._number += 1
        case {'undo': int(number)}:
          actions.pop(number, None)
    return actions

  def add(self, action: Action) -> int:
    """Writes an action; returns its number."""
    self._append(
      {'moves': action.moves} if action.moves else {'skip': action.skipped}
    )
    self._number += 1
    return self._number - 1

  def undo(self, number: int) -> None:
    self._append({'undo': number})

  def _append(self, entry: dict[str, Any]):
    """All of a line, or an OSError and nothing of it."""
    line = memoryview(json.dumps(entry).encode() + b'\n')
    end = os.fstat(self._file).st_size
    try:
      while line:
        line = line[os.write(self._file, line) :]
      os.fsync(self._file)
    except OSError:
      with contextlib.suppress(OSError):
        os.ftruncate(self._file, end)
      raise


def _parse(line):
  try:
    return json.loads(line)
  except (ValueError, RecursionError):
    return None


def _is_move(pair):
  """Whether a pair stays in the folder: the journal may be anyone's."""
  match pair:
    case [str(source), str(target)]:
      old, new = (pathlib.PurePosixPath(path).parts for path in pair)
      return (
        '\0' not in source + target
        and not {'..', '/'}.intersection((*old, *new))
        and new[:1] == (LABELED,)
        and len(new) > 2
      )
  return False
