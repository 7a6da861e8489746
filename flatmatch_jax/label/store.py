"""The files of a folder that is being labeled.

An image gets its label by one rename, into DIR/labeled/CLASS/, and keeps the
folders that it lay in. Where the files are is the truth; the journal is for
undo, and for what was skipped.
"""

from collections.abc import Iterable, Iterator
import contextlib
import os
import pathlib
import threading
import unicodedata

from flatmatch_jax.data import images, layouts
from flatmatch_jax.label.journal import LABELED, Action, Journal
from flatmatch_jax.system import files, messages
from flatmatch_jax.types import UserError

_SOURCE = 'unlabeled'
_APART = (LABELED, *layouts.TESTS)  # Folders of DIR whose images have labels.
_MAX_NAME = 100  # Bytes of a class's name; file systems allow 255.


def check_class(name: str) -> str:
  """The name of a class as its folder is called; UserError says why not."""
  name = unicodedata.normalize('NFC', name).strip()
  refusal = ''
  if not name:
    refusal = 'is empty'
  elif '/' in name or '\\' in name:
    refusal = 'has a slash, which would start another folder'
  elif not name.isprintable():
    refusal = 'has characters that cannot be shown'
  elif images.is_hidden(pathlib.Path(name)):
    refusal = 'would be a hidden folder'
  elif len(name.encode()) > _MAX_NAME:
    refusal = f'is longer than {_MAX_NAME} bytes'
  if refusal:
    raise UserError(
      f'The class name {name[:40]!r} {refusal}; choose another name.'
    )
  return name


class Store:
  """The images of one folder. Images and classes are numbers from 0.

  Attributes:
    classes: their names.
    counts: how many images the folder of each class holds.
    pending, skipped: images.
    unreadable: images, and why.
    links: how many were passed over.
  """

  def __init__(self, folder: str, class_names: Iterable[str] = ()):
    # First, as the run may have used other data.
    known = list(map(check_class, class_names))
    self.root = pathlib.Path(folder).expanduser().resolve()
    if not self.root.is_dir():
      raise UserError(
        f'{folder} is not a folder; name the one with the images.'
      )
    self.links = 0
    self._check_layout()
    if not any(self._find()) and not any(self._walk(self.root / LABELED)):
      raise UserError(
        f'{self.root} holds no images to label; put some there '
        f'({" ".join(images.EXTENSIONS)}).'
      )
    self._lock = threading.RLock()  # Tabs take turns.
    self._journal = Journal(self.root)
    earlier = self._journal.read()
    self._actions = {
      number: Action([m for m in moves if self._is_done(*m)], skipped)
      for number, (moves, skipped) in earlier.items()
    }
    self.links = 0
    self._paths = list(self._find())
    self._numbers = {path: number for number, path in enumerate(self._paths)}
    self._order = list(range(len(self._paths)))
    self.counts = {
      entry.name: sum(1 for _ in self._walk(entry.path))
      for entry in _entries(self.root / LABELED)
      if entry.is_dir(follow_symlinks=False)
    }
    named = [t.split('/')[1] for a in earlier.values() for _, t in a.moves]
    self.classes = list(dict.fromkeys([*known, *named, *sorted(self.counts)]))
    self.pending = set(self._order)
    self.unreadable: dict[int, str] = {}
    self.skipped: set[int] = set()
    for action in self._actions.values():
      self._skip(action.skipped)

  def close(self) -> None:
    self._journal.close()

  # Looking.

  def _check_layout(self):
    """Training refuses labels from two places, or would leave one out."""
    for place in layouts.sources(self.root):
      if place.name == layouts.TABLE:
        raise UserError(f'{place} has the labels; write new ones there.')
      if place.name != LABELED:
        raise UserError(
          f'{place} has the labels, and new ones go to {LABELED}/; move its '
          f'folders into {self.root / LABELED}.'
        )
    if (self.root / LABELED).exists() or not (self.root / _SOURCE).is_dir():
      return
    beside = self._walk(self.root, apart=(_SOURCE, *_APART))
    if len(classes := {p.split('/')[0] for p in beside if '/' in p}) > 1:
      raise UserError(
        f'{self.root} has labels in {messages.some(sorted(classes))}, and new '
        f'ones go to {LABELED}/; move those folders into it.'
      )

  def _find(self):
    """Images without labels: in unlabeled/, or anywhere if there is none."""
    source = self.root / _SOURCE
    if source.is_symlink():
      raise UserError(
        f'{source} is a link, and images are moved out of it; name the folder '
        'that it leads to, or put a folder in its place.'
      )
    if source.is_dir():
      return self._walk(source)
    return self._walk(self.root, apart=_APART)

  def _walk(self, folder, apart=()) -> Iterator[str]:
    """Images at any depth, relative to the root.

    Links are passed over: they may lead out of it, or break when moved.
    """
    for entry in _entries(folder):
      if images.is_hidden(pathlib.Path(entry.name)) or entry.name in apart:
        continue
      if entry.is_symlink():
        self.links += 1
      elif entry.is_dir():
        yield from self._walk(entry.path)
      elif (
        entry.is_file()
        and os.path.splitext(entry.name)[1].lower() in images.EXTENSIONS
      ):
        yield os.path.relpath(entry.path, self.root)

  def path(self, number: int) -> pathlib.Path:
    return self.root / self._paths[number]

  def name(self, number: int) -> str:
    """Its path for people."""
    return messages.printable(self._inside(number))

  def _inside(self, number):
    return self._paths[number].removeprefix(f'{_SOURCE}/')

  def labeled_paths(self) -> list[pathlib.Path]:
    return [self.root / path for path in self._walk(self.root / LABELED)]

  def next(self, count: int, shown: Iterable[int] = ()) -> list[int]:
    """Up to `count` images to label: those that are `shown` come first."""
    with self._lock:
      found = [number for number in shown if number in self.pending][:count]
      for number in self._order:
        if len(found) >= count:
          break
        if number in self.pending and number not in found:
          found.append(number)
      return found

  def reorder(self, order: list[int]) -> None:
    """Sets which images come first; the others follow as before."""
    with self._lock:
      self._order = list(dict.fromkeys([*order, *self._order]))

  # Acting.

  def add_class(self, name: str) -> int:
    """The number of a class, which may be new."""
    name = check_class(name)
    with self._lock:
      for number, known in enumerate(self.classes):
        if known.casefold() == name.casefold():  # One folder on some disks.
          return number
      self.classes.append(name)
      return len(self.classes) - 1

  def label(
    self, labels: Iterable[tuple[int, int]]
  ) -> tuple[int | None, list[str]]:
    """Moves images to their classes, given as pairs of image and class.

    Returns the number of the action, and lines about what was not done.
    """
    with self._lock:
      notes, moves = [], []
      for number, label in labels:
        if number in self.pending:
          target = f'{LABELED}/{self.classes[label]}/{self._inside(number)}'
          moves.append((self._paths[number], self._free(target)))
        else:
          notes.append(f'{self.name(number)} has been dealt with already.')
      if not moves:
        return None, notes
      action = self._journal.add(Action(moves, []))
      done = self._actions[action] = Action([], [])
      for source, target in moves:
        number = self._numbers[source]
        try:
          self._move(source, target)
        except FileNotFoundError:
          self.set_unreadable(number, 'it is gone')
          notes.append(f'{self.name(number)} is gone.')
          continue
        self.pending.discard(number)
        done.moves.append((source, target))
        self._count(target, 1)
      return action, notes

  def skip(self, numbers: Iterable[int]) -> int | None:
    with self._lock:
      paths = [self._paths[n] for n in numbers if n in self.pending]
      if not paths:
        return None
      action = self._journal.add(Action([], paths))
      self._actions[action] = Action([], paths)
      self._skip(paths)
      return action

  def _skip(self, paths):
    numbers = {self._numbers[path] for path in paths if path in self._numbers}
    self.skipped |= numbers & self.pending
    self.pending -= numbers

  def undo(self, action: int | None = None) -> list[int]:
    """Takes back an action, or the last one; returns its images."""
    with self._lock:
      if action is None:
        done = [number for number, found in self._actions.items() if any(found)]
        action = max(done, default=None)
      if action not in self._actions:
        raise UserError('There is nothing to undo.')
      moves, skipped = self._actions[action]
      back = {self._numbers[p] for p in skipped if p in self._numbers}
      self.skipped -= back
      while moves:  # One by one: a disk may refuse the next.
        source, target = moves[-1]
        old = self._free(source)
        with contextlib.suppress(FileNotFoundError):  # Somebody removed it.
          self._move(target, old)
          back.add(self._number(old))
        self.pending |= back
        moves.pop()
        self._count(target, -1)
      self.pending |= back
      with contextlib.suppress(OSError):  # Then looking at the files tells.
        self._journal.undo(action)
      del self._actions[action]
      return sorted(back)

  def again(self) -> None:
    """Makes what was skipped pending."""
    with self._lock:
      for number, action in list(self._actions.items()):
        if action.skipped:
          self.undo(number)

  def set_unreadable(self, number: int, reason: str) -> None:
    with self._lock:
      if number in self.pending:
        self.pending.remove(number)
        self.unreadable[number] = reason

  def _number(self, path):
    """Of an image that is back; an earlier session may have moved it."""
    if path not in self._numbers:
      self._numbers[path] = len(self._paths)
      self._order.append(len(self._paths))
      self._paths.append(path)
    return self._numbers[path]

  def _count(self, target, difference):
    name = target.split('/')[1]
    self.counts[name] = self.counts.get(name, 0) + difference

  # Moving.

  def _free(self, path):
    """`path`, or one like it that no file has."""
    stem, suffix = os.path.splitext(path)
    number = 1
    while os.path.lexists(self.root / path):
      number += 1
      path = f'{stem}-{number}{suffix}'
    return path

  def _move(self, source, target):
    """Renames, never over another file and never out of the folder."""
    old, new = self.root / source, self.root / target
    self._check_inside(old)
    self._check_inside(new)
    try:
      new.parent.mkdir(parents=True, exist_ok=True)
      # Takes the name. A crash here leaves an empty file; see `_is_done`.
      os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
      try:
        old.replace(new)
      except BaseException:
        new.unlink()
        raise
    except BaseException:
      self._prune(new.parent)
      raise
    files.sync_folder(new.parent)
    files.sync_folder(old.parent)
    self._prune(old.parent)

  def _is_done(self, source, target):
    """Whether a move of an earlier session took place, and can be undone."""
    old, new = self.root / source, self.root / target
    if old.is_file() and new.is_file():
      empty = [path for path in (old, new) if not path.stat().st_size]
      if len(empty) == 1:  # A crash left it.
        self._check_inside(empty[0])
        empty[0].unlink()
        self._prune(empty[0].parent)
    return new.is_file() and not old.is_file()

  def _check_inside(self, path):
    if not path.parent.resolve().is_relative_to(self.root):
      raise UserError(
        f'{path} would be outside of {self.root}, because a folder is a link; '
        'put a folder in its place.'
      )

  def _prune(self, folder):
    """Removes folders of classes that are empty: training refuses them."""
    with contextlib.suppress(OSError):
      while folder.is_relative_to(self.root / LABELED):
        folder.rmdir()
        folder = folder.parent


def _entries(folder) -> list[os.DirEntry]:
  """What lies in a folder, by name; nothing if it is a link or not there."""
  if os.path.islink(folder) or not os.path.isdir(folder):
    return []
  with os.scandir(folder) as entries:
    return sorted(entries, key=lambda entry: entry.name)
