"""Which images of a folder have which labels, however the folder is made.

  labeled/CLASS/…    and unlabeled/…, or images anywhere beside labeled/
  train/CLASS/…      as unpacked datasets come
  CLASS/…            directly in the folder
  labels.csv         path,label; see labels_csv.py

All may have test/CLASS/… (or val/, valid/, validation/) beside them, the first
three unlabeled/…, too. Images lie at any depth; links are followed, and
hidden files passed over.
"""

from collections.abc import Iterable
import os
import pathlib
from typing import NamedTuple
import unicodedata

from flatmatch_jax.data import images, labels_csv
from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError

TESTS = ('test', 'val', 'valid', 'validation')  # The first that is there.
TABLE = 'labels.csv'
_ACCEPTED = (
  'accepted are labeled/CLASS/* with unlabeled/*, train/CLASS/*, CLASS/* (each '
  'with test/CLASS/* or val/CLASS/* if you have it), or labels.csv with the '
  'columns path,label'
)


class Part(NamedTuple):
  """The images to learn from with labels, without labels, or to test on."""

  place: str  # For messages; '' if the user has none of it.
  paths: list[pathlib.Path]
  labels: list[int]  # Of each path; -1 where unknown.
  skipped: dict[pathlib.Path, str]  # Other files, and why.


class Layout(NamedTuple):
  """What was found."""

  root: pathlib.Path
  name: str  # How labels are given, in words.
  class_names: tuple[str, ...]
  parts: tuple[Part, Part, Part]  # Labeled, unlabeled, test.
  table: str = ''  # Name of the CSV file, if not all of the folder is used.


def find(data_dir: str | os.PathLike | None) -> Layout:
  """Decides which layout a folder or CSV file has, and lists its images.

  Each part is sorted by path, and so are the classes by name. UserError where
  images could have other labels as well.
  """
  if not data_dir:
    raise UserError(
      'config.data_dir is empty; name the folder of your images with '
      f'--config.data_dir=DIR: {_ACCEPTED}.'
    )
  root = pathlib.Path(data_dir).expanduser().absolute()
  if root.is_file() and root.suffix.lower() == '.csv':
    return _of_table(root.parent, root)
  if not root.is_dir():
    raise UserError(
      f'{root} is not a folder, nor a CSV file of path,label; name one with '
      '--config.data_dir=DIR.'
    )
  folders = {p.name: p for p in _visible(root) if p.is_dir()}
  given = sources(root)
  if len(given) > 1:
    names = [f'{p.name}/' if p.is_dir() else p.name for p in given]
    raise UserError(
      f'{root} has labels in {" and in ".join(names)}; move all but one of '
      f'them elsewhere, or name one alone; {_ACCEPTED}.'
    )
  if given and given[0].name == TABLE:
    return _of_table(root, given[0])
  return _of_folders(root, folders, given[0] if given else None)


def sources(root: pathlib.Path) -> list[pathlib.Path]:
  """What gives labels in a folder, if not the folders of classes in it."""
  labeled, train, table = root / 'labeled', root / 'train', root / TABLE
  given = [labeled] if labeled.is_dir() else []
  if train.is_dir() and _folders(train):  # Else of vehicles, or of a table.
    given.append(train)
  return [*given, table] if table.is_file() else given


def _of_folders(root, folders, labeled):
  """Of class folders in `labeled`, or in `root` if that is None."""
  tests = [folders[name] for name in TESTS if name in folders]
  unlabeled = folders.get('unlabeled')
  used = [p for p in (labeled, unlabeled, *tests[:1]) if p]
  apart = {p.name: p for p in folders.values() if p not in (*used, *tests)}
  above = [root, *used]
  if labeled:
    classes = _folders(labeled)
    _refuse_loose(labeled)
  else:
    classes = list(apart.values())
    _check_plain(root, classes)
    apart = {}
  class_names, labeled_part = _of_classes(labeled or root, classes, above)
  test_part = Part('', [], [], {})
  if tests:
    _refuse_loose(tests[0])
    names, test_part = _of_classes(tests[0], _folders(tests[0]), above)
    test_part = _renumbered(test_part, names, class_names, labeled_part.place)
  words = [f'{labeled.name}/CLASS' if labeled else 'CLASS']
  unlabeled_part = Part('', [], [], {})
  beside = labeled is not None and labeled.name == 'labeled'
  if beside:
    _refuse_twins(root, apart, class_names)
  if unlabeled:
    found = images.find(unlabeled, above)
    unlabeled_part = _without_labels(str(unlabeled), *found)
    words.append('unlabeled/')
  elif beside:
    found = images.find(root, [*above, *tests])
    if found.images:
      unlabeled_part = _without_labels(str(root), found.images, {})
      words.append(f'the images beside {labeled.name}/')
    apart = {}
  words += [f'{path.name}/CLASS' for path in tests[:1]]
  if unused := [*(path.name for path in tests[1:]), *apart]:
    words.append(f'not used: {messages.some([f"{x}/" for x in unused])}')
  parts = labeled_part, unlabeled_part, test_part
  return Layout(root, ', '.join(words), class_names, parts)


def _of_classes(folder, classes, above):
  """Sorted names of class folders, and their images, labeled 0, 1, …"""
  part = Part(str(folder), [], [], {})
  part.skipped.update(
    {p: 'not a folder of a class' for p in _visible(folder) if not p.is_dir()}
  )
  # What macOS and Linux write in other bytes is the same name.
  named = [(unicodedata.normalize('NFC', p.name), p) for p in classes]
  names = tuple(sorted({name for name, _ in named}))
  for name, path in sorted(named):
    found = images.find(path, above)
    part.paths.extend(found.images)
    part.labels.extend([names.index(name)] * len(found.images))
    part.skipped.update(found.others)
  return names, part


def _of_table(root, table):
  """Of a CSV file; images beside a labels.csv that it lacks have no label."""
  rows = labels_csv.read(table)
  tests = [name for name in TESTS if any(row.split == name for row in rows)]
  train = [row for row in rows if row.split == 'train']
  labeled, class_names = _listed(root, table, [r for r in train if r.label])
  unlabeled, _ = _listed(root, table, [r for r in train if not r.label])
  test = Part('', [], [], {})
  if tests:
    test, names = _listed(root, table, [r for r in rows if r.split == tests[0]])
    test = _renumbered(test, names, class_names, str(table))
  words = [table.name]
  unused = [f'split {name}' for name in tests[1:]]
  if table.name == TABLE:
    known = {os.path.normpath(root / row.path) for row in rows}
    is_new = lambda path: os.path.normpath(path) not in known
    folders = [p for p in map(root.joinpath, TESTS) if p.is_dir()]
    folders = [path for path in folders if _folders(path)]
    if beside := [p for p in images.find(root, folders).images if is_new(p)]:
      together = sorted([*unlabeled.paths, *beside])
      unlabeled = _without_labels(str(root), together, unlabeled.skipped)
      words.append('the images it does not list')
    folders = [p for p in folders if any(map(is_new, images.find(p).images))]
    if folders and not tests:
      place = folders.pop(0)
      _refuse_loose(place)
      names, test = _of_classes(place, _folders(place), [root])
      test = _renumbered(test, names, class_names, str(table))
      found = zip(test.paths, test.labels, strict=True)
      kept = [(path, label) for path, label in found if is_new(path)]
      test = test._replace(
        paths=[path for path, _ in kept], labels=[label for _, label in kept]
      )
      words.append(f'{place.name}/CLASS')
    unused += [f'{path.name}/' for path in folders]
  if unused:
    words.append(f'not used: {messages.some(unused)}')
  parts = labeled, unlabeled, test
  name = '' if table.name == TABLE else table.name
  return Layout(root, ', '.join(words), class_names, parts, name)


def _listed(root, table, rows):
  """The files of some rows, and the sorted names of their classes."""
  names = tuple(sorted({row.label for row in rows if row.label}))
  part = Part(str(table) if rows else '', [], [], {})
  for path, label in sorted((root / row.path, row.label) for row in rows):
    if path.is_file():
      part.paths.append(path)
      part.labels.append(names.index(label) if label else -1)
    else:
      part.skipped[path] = 'no such file'
  if rows and not part.paths:
    raise UserError(
      f'{table} lists {rows[0].path!r} and '
      f'{messages.count(len(rows) - 1, "other file")}, none of which is there; '
      f'write paths as seen from {root}.'
    )
  return part, names


def _without_labels(place, paths, skipped):
  return Part(place, paths, [-1] * len(paths), skipped)


def _renumbered(test, names, class_names, place):
  """The test images with the labels of the classes that are learned."""
  for name in names:
    if name not in class_names:
      raise UserError(
        f'Class {name!r} of {test.place} is not in {place}, which has: '
        f'{messages.some(class_names)}; rename or remove it, or label images '
        'of it.'
      )
  labels = [class_names.index(names[label]) for label in test.labels]
  return test._replace(labels=labels)


def _check_plain(root, classes):
  """Whether folders are classes, and not something else."""
  loose = _loose(root)
  if not classes and (loose or (root / 'unlabeled').is_dir()):
    raise UserError(
      f'The images in {root} have no labels. Give some with python -m '
      f'flatmatch_jax.label {root}, or sort them: {_ACCEPTED}.'
    )
  if not classes:
    raise UserError(f'{root} holds no folders of images; {_ACCEPTED}.')
  if len(classes) == 1:
    (only,) = classes
    raise UserError(
      f'{root} has only one folder of images, {only.name}/, and a classifier '
      f'needs at least two classes. If they are inside, name it: '
      f'--config.data_dir={only}; else {_ACCEPTED}.'
    )
  if loose:
    raise UserError(
      f'{loose} lies beside the folders of classes in {root}, so its class is '
      'unknown; move it into one of them, or into unlabeled/.'
    )
  below = [{path.name for path in _folders(folder)} for folder in classes]
  seen = sorted(a for a in below[0] if any(a in other for other in below[1:]))
  if seen and not any(_loose(folder) for folder in classes):
    raise UserError(
      f'{root}: {messages.some([p.name for p in classes])} or, in each of '
      f'them, {messages.some(seen)} could be the classes. Move the folders of '
      f'the classes into train/; {_ACCEPTED}.'
    )


def _refuse_loose(folder):
  if path := _loose(folder):
    raise UserError(
      f'{path} lies directly in {folder.name}/, so its class is unknown; '
      f'move it into a folder {folder.name}/CLASS/, or into unlabeled/.'
    )


def _refuse_twins(root, apart, class_names):
  """Folders beside labeled/ that may hold labels, too."""
  if twins := [name for name in apart if name in class_names]:
    raise UserError(
      f'{root} has {twins[0]}/ and labeled/{twins[0]}/: do the images of the '
      f'first have that label? Move it into labeled/ or into unlabeled/.'
    )


def _visible(folder) -> list[pathlib.Path]:
  return sorted(p for p in folder.iterdir() if not images.is_hidden(p))


def _folders(folder) -> list[pathlib.Path]:
  return [path for path in _visible(folder) if path.is_dir()]


def _loose(folder) -> pathlib.Path | None:
  """An image that lies directly in a folder."""
  paths: Iterable[pathlib.Path] = _visible(folder)
  here = (p for p in paths if p.suffix.lower() in images.EXTENSIONS)
  return next((path for path in here if not path.is_dir()), None)
