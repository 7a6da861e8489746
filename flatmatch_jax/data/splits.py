"""Which training examples play which part: drawn by seed, or read from a file.

All draws are `np.random.RandomState`'s: numpy guarantees its stream for ever,
while that of `default_rng` may change with a release (NEP 19).
"""

from collections.abc import Sequence
import json
import os
import pathlib
import re
from typing import Any, NamedTuple
import zlib

import numpy as np

from flatmatch_jax.system import files, messages
from flatmatch_jax.types import UserError, shortened

ALL = 'all'  # As `number`: every example whose label is known.

_MAX_BYTES = 32 * 2**20  # ImageNet's 1.3 million indices take 10 MB.


class Split(NamedTuple):
  """Sorted indices of training examples."""

  labeled: np.ndarray  # Their labels may be used.
  unlabeled: np.ndarray  # The pool of unlabeled images.
  validation: np.ndarray  # Held out, to choose among models by.


def make(
  labels: np.ndarray,
  num_classes: int,
  number: int | str,
  seed: int,
  file: str = '',
  imbalance: float = 1.0,
  unlabeled_imbalance: float = 1.0,
  num_val: int = 0,
  includes_labeled: bool = True,
  names: Sequence[str] = (),
) -> Split:
  """Parts the training examples.

  Args:
    labels: [N], -1 where unknown; those are never drawn as labeled.
    num_classes: labels are below this.
    number: total of labeled examples, or `ALL`.
    seed: of the split alone, apart from the seed of training.
    file: of the indices of `number` labeled examples, instead of a draw.
    imbalance: how many times as many labels the first class has as the last.
    unlabeled_imbalance: the same for the unlabeled pool.
    num_val: examples to hold out. The labeled ones do not depend on this number
      unless they are `ALL`.
    includes_labeled: whether labeled examples are in the unlabeled pool too.
    names: of the classes, for messages.
  """
  everything = number == ALL and not file
  if file:
    labeled = read(file, labels, num_classes, names)
    if number not in (ALL, len(labeled)):
      raise UserError(
        f'Labels file {file} lists {len(labeled)} examples, but labels='
        f'{number}, by which numbers are chosen; set the same with the file: '
        f'--config FILE.py:labels={len(labeled)}.'
      )
  elif everything or imbalance == 1:
    labeled = balanced(labels, number, seed, num_classes, names)
  else:
    labeled = long_tailed(
      labels, int(number), imbalance, seed, num_classes, names
    )
  validation = _hold_out(labels, labeled, everything, num_val, seed)
  labeled = np.setdiff1d(labeled, validation)
  pool = np.setdiff1d(np.arange(len(labels)), validation)
  if not includes_labeled:
    pool = np.setdiff1d(pool, labeled)
  if len(pool) and unlabeled_imbalance != 1:
    pool = _thin(
      labels, pool, labeled, unlabeled_imbalance, seed, num_classes, names
    )
  if not len(pool):
    raise UserError(
      f'All {len(labeled)} images are labeled, and with '
      'config.unlabeled_includes_labeled=False none is left in the unlabeled '
      'pool; set it to true, or take fewer labels.'
    )
  return Split(labeled, pool, validation)


def balanced(
  labels: np.ndarray,
  number: int | str,
  seed: int,
  num_classes: int,
  names: Sequence[str] = (),
) -> np.ndarray:
  """Draws `number` / `num_classes` examples of each class, or `ALL`."""
  if number == ALL:
    return np.flatnonzero(labels >= 0).astype(np.int64)
  number = int(number)
  if number <= 0 or number % num_classes:
    raise UserError(
      f'Number of labels {number} must be a positive multiple of the '
      f'{num_classes} classes; choose {nearest(number, num_classes)}, or '
      f'{ALL} for all labels.'
    )
  need = np.full(num_classes, number // num_classes)
  return _draw(labels, need, np.random.RandomState(seed), names)


def nearest(number: int, num_classes: int) -> str:
  """The multiples of `num_classes` around a number that is none: '4 or 8'."""
  below = max(number // num_classes, 0) * num_classes
  return ' or '.join(str(n) for n in (below, below + num_classes) if n)


def long_tailed(
  labels: np.ndarray,
  number: int,
  factor: float,
  seed: int,
  num_classes: int,
  names: Sequence[str] = (),
) -> np.ndarray:
  """Draws `number` examples, class k in proportion to factor^(-k / (K - 1)).

  The first class has `factor` times as many as the last, at least one each;
  a factor below one turns the order around.
  """
  if number < num_classes:
    raise UserError(
      f'Number of labels {number} is less than the {num_classes} classes; take '
      'at least one of each.'
    )
  need = np.maximum(_share(number, _tail(factor, num_classes)), 1)
  while need.sum() > number:  # What the least ones were given.
    need[np.argmax(need)] -= 1
  return _draw(labels, need, np.random.RandomState(seed), names)


def _tail(factor, num_classes):
  """The weights of a long tail, from 1 down to 1 / `factor`."""
  return factor ** -(np.arange(num_classes) / max(num_classes - 1, 1))


def _share(total: int, weights: np.ndarray) -> np.ndarray:
  """Parts `total` in proportion to `weights`; largest remainders round up."""
  exact = total * weights / weights.sum()
  parts = np.floor(exact).astype(np.int64)
  order = np.argsort(-(exact - parts), kind='stable')
  parts[order[: total - parts.sum()]] += 1
  return parts


def _draw(labels, need, rng, names=()) -> np.ndarray:
  """Class after class without replacement, as published code bases draw."""
  drawn = []
  for label, number in enumerate(need):
    indices = np.flatnonzero(labels == label)
    if len(indices) < number:
      raise UserError(
        f'Class {_name(names, label)} has '
        f'{messages.count(len(indices), "labeled image")}; {need.sum()} labels '
        f'need {number}. Label more images of it, or ask for fewer labels.'
      )
    drawn.append(rng.choice(indices, number, replace=False))
  return np.sort(np.concatenate(drawn)).astype(np.int64)


def _name(names, label) -> str:
  return repr(names[label]) if names else str(label)


def _hold_out(labels, labeled, everything, num_val, seed) -> np.ndarray:
  """Draws from each class in proportion to what may be held out of it.

  Those are its examples that are not labeled; if all are, all but one.
  """
  spare = labels >= 0
  if not everything:
    spare[labeled] = False
  counts = np.bincount(labels[spare])
  if everything:
    counts = np.maximum(counts - 1, 0)
  if num_val > counts.sum():
    raise UserError(
      f'config.num_val={num_val} is more than the {counts.sum()} training '
      'examples with a label that can be held out; choose fewer.'
    )
  if not num_val:
    return np.zeros(0, np.int64)
  rest = np.where(spare, labels, -1)
  return _draw(rest, _share(num_val, counts), np.random.RandomState([seed, 1]))


def _thin(
  labels, pool, labeled, factor, seed, num_classes, names
) -> np.ndarray:
  """The most of `pool` that has a long tail, with the labeled ones in it."""
  unknown = np.sum(labels[pool] < 0)
  if unknown:
    raise UserError(
      f'config.unlabeled_imbalance={factor} thins out classes, but the classes '
      f'of {unknown} unlabeled images are unknown; set it to 1.'
    )
  inside = np.full(len(labels), -1)
  inside[pool] = labels[pool]
  weights = _tail(factor, num_classes)
  counts = np.bincount(labels[pool], minlength=num_classes)
  need = np.floor(weights * np.min(counts / weights) + 1e-9).astype(np.int64)
  stay = np.intersect1d(pool, labeled)
  given = np.bincount(labels[stay], minlength=num_classes)
  if (given > need).any():
    scarce = np.argmax(given - need)
    raise UserError(
      f'config.unlabeled_imbalance={factor} leaves '
      f'{messages.count(need[scarce], "image")} of class '
      f'{_name(names, scarce)} in the unlabeled pool, fewer than its '
      f'{given[scarce]} labeled ones, which stay in it; take fewer labels, a '
      'smaller factor, or config.unlabeled_includes_labeled=false.'
    )
  inside[stay] = -1
  drawn = _draw(inside, need - given, np.random.RandomState([seed, 2]))
  return np.union1d(drawn, stay)


def spread(labels: np.ndarray, count: int) -> np.ndarray:
  """Rows over all classes, also where images come class by class."""
  known = min(len(labels), max(count, int(np.sum(labels >= 0))))
  return np.linspace(0, known - 1, count).astype(int)


def read(
  path: str | os.PathLike,
  labels: np.ndarray,
  num_classes: int,
  names: Sequence[str] = (),
) -> np.ndarray:
  """Reads indices of labeled examples that the user chose, sorted.

  The file holds a JSON list, a JSON object whose 'labeled' is one (such as the
  split.json of a run), or one integer per line.
  """
  indices = _parse(path)
  if not indices:
    raise UserError(
      f'Labels file {path} holds no index; list at least one of each class.'
    )
  for index in indices:
    if type(index) is not int:  # A bool is an int, too.
      raise UserError(
        f'Labels file {path}: {shortened(index)} is not an integer; list '
        'indices of training examples.'
      )
    if not 0 <= index < len(labels):
      raise UserError(
        f'Labels file {path}: index {shortened(index)} is outside of the '
        f'{len(labels)} training examples; count from 0, and check that the '
        'file belongs to this dataset.'
      )
    if labels[index] < 0:
      raise UserError(
        f'Labels file {path}: the label of example {index} is unknown; list '
        'only examples that have a label.'
      )
  labeled = np.sort(np.array(indices, np.int64))
  repeated = labeled[1:][labeled[1:] == labeled[:-1]]
  if len(repeated):
    raise UserError(
      f'Labels file {path}: index {repeated[0]} occurs more than once; list '
      'each example once.'
    )
  absent = np.flatnonzero(_per_class(labeled, labels, num_classes) == 0)
  if len(absent):
    raise UserError(
      f'Labels file {path}: no example of class {_name(names, absent[0])} '
      f'({len(absent)} of {num_classes} classes absent); list at least one of '
      'each.'
    )
  return labeled


def most_confident(
  confidence: np.ndarray,
  guess: np.ndarray,
  labeled: np.ndarray,
  number: int,
  labels: np.ndarray,
) -> dict[str, Any]:
  """The `number` surest guesses [N] among the images that are not `labeled`.

  Over all classes together (Algorithm 2). The true `labels` are for the
  reported accuracy only: in percent, None where no truth is known.
  """
  confidence = confidence.copy()
  confidence[labeled] = -1.0
  number = min(number, len(confidence) - len(labeled))
  # Stable: equal confidences are taken in the order of the images.
  index = np.sort(np.argsort(-confidence, kind='stable')[:number])
  label = guess[index].astype(int)
  known = labels[index] >= 0
  right = (label == labels[index])[known]
  return {
    'crc32': _crc32(index, label),
    'index': index.tolist(),
    'label': label.tolist(),
    'confidence': confidence[index].tolist(),
    'accuracy': round(100 * right.mean(), 2).item() if len(right) else None,
  }


def are_fixed(chosen: Any, num_train: int, num_classes: int) -> bool:
  """Whether `chosen` is what `most_confident` gave, for so many images."""
  try:
    index, label = (
      np.array(found, None if found else int)  # Of no elements: float.
      for found in (chosen['index'], chosen['label'])
    )
    return (
      index.dtype == label.dtype == int
      and index.shape == label.shape == (len(index),)
      and bool(((index >= 0) & (index < num_train)).all())
      and bool(((label >= 0) & (label < num_classes)).all())
      and chosen['crc32'] == _crc32(index, label)
    )
  except (KeyError, TypeError, ValueError, OverflowError):
    return False


def _crc32(*arrays) -> int:
  return zlib.crc32(np.stack(arrays).astype('<i8').tobytes())


def to_json(
  split: Split, labels: np.ndarray, num_classes: int, seed: int, file: str = ''
) -> dict[str, Any]:
  """What a run writes as split.json, which `read` accepts.

  `seed` and `file` are those of `make`.
  """
  pool = split.unlabeled[labels[split.unlabeled] >= 0]
  return {
    'split_seed': None if file else seed,
    'source': file or 'drawn',
    'labeled': split.labeled.tolist(),
    'per_class': _per_class(split.labeled, labels, num_classes).tolist(),
    'unlabeled_per_class': _per_class(pool, labels, num_classes).tolist(),
    'validation': split.validation.tolist(),
  }


def _per_class(labeled, labels, num_classes: int) -> np.ndarray:
  return np.bincount(labels[labeled], minlength=num_classes)


def _parse(path: str | os.PathLike) -> list[Any]:
  """The entries of the file, of whatever type they are."""
  try:
    raw = files.read_bytes(pathlib.Path(path), _MAX_BYTES)
    text = raw.decode('utf-8-sig').strip()
  except (OSError, ValueError) as error:
    raise UserError(
      f'Labels file {path} cannot be read: {error}; give a text file of '
      'indices, or an empty path to draw the labels.'
    ) from error
  if text[:1] not in ('[', '{'):
    return [
      int(line) if re.fullmatch(r'-?[0-9]{1,18}', line) else line
      for line in map(str.strip, text.splitlines())
      if line
    ]
  try:
    content = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(
      f'Labels file {path} starts like JSON but is not valid: {error}; write '
      'a JSON list, or one integer per line.'
    ) from error
  if isinstance(content, dict):
    if not isinstance(content.get('labeled'), list):
      raise UserError(
        f'Labels file {path}: a JSON object needs a list under the key '
        f"'labeled', but its keys are {shortened(list(content))}."
      )
    content = content['labeled']
  return content
