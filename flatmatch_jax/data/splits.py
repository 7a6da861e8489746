"""Which training examples are labeled: drawn by seed, or read from a file."""

import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from flatmatch_jax.types import UserError

ALL = 'all'  # As `number`: every example whose label is known.

_MAX_BYTES = 32 * 2**20  # ImageNet's 1.3 million indices take 10 MB.


def balanced(
  labels: np.ndarray, number: int | str, seed: int, num_classes: int
) -> np.ndarray:
  """Draws `number` / `num_classes` examples of each class.

  Class after class without replacement, as the published code bases do, with
  `np.random.RandomState`: numpy guarantees its stream for ever, while that of
  `default_rng` may change with a release (NEP 19).

  Args:
    labels: [N], -1 where unknown; those are never drawn.
    number: Total of labeled examples, or `ALL`.
    seed: Of the split alone, apart from the seed of training.
    num_classes: Labels are below this.

  Returns:
    Sorted int64 indices into `labels`.
  """
  if number == ALL:
    return np.flatnonzero(labels >= 0).astype(np.int64)
  number = int(number)
  if number <= 0 or number % num_classes:
    raise UserError(
      f'Number of labels {number} must be a positive multiple of the '
      f'{num_classes} classes; choose one, or {ALL} for all labels.'
    )
  if not 0 <= seed < 2**32:
    raise UserError(
      f'Split seed {seed} must lie in [0, 2**32); choose another.'
    )
  need = number // num_classes
  rng = np.random.RandomState(seed)
  drawn = []
  for label in range(num_classes):
    indices = np.flatnonzero(labels == label)
    if len(indices) < need:
      raise UserError(
        f'Class {label} has {len(indices)} labeled examples, but {number} '
        f'labels need {need} of each class; ask for fewer labels.'
      )
    drawn.append(rng.choice(indices, need, replace=False))
  return np.sort(np.concatenate(drawn)).astype(np.int64)


def read(
  path: str | os.PathLike, labels: np.ndarray, num_classes: int
) -> np.ndarray:
  """Reads indices of labeled examples that the user chose.

  The file holds a JSON list, a JSON object whose 'labeled' is one (such as the
  split.json of a run), or one integer per line.

  Returns:
    Sorted int64 indices into `labels`, at least one of each class.
  """
  indices = _parse(path)
  if not indices:
    raise UserError(
      f'Labels file {path} holds no index; list at least one of each class.'
    )
  for index in indices:
    if type(index) is not int:  # A bool is an int, too.
      raise UserError(
        f'Labels file {path}: {_short(index)} is not an integer; list indices '
        f'of training examples.'
      )
    if not 0 <= index < len(labels):
      raise UserError(
        f'Labels file {path}: index {_short(index)} is outside of the '
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
      f'Labels file {path}: no example of class {absent[0]} ({len(absent)} of '
      f'{num_classes} classes are absent); list at least one of each.'
    )
  return labeled


def most_confident(
  probabilities: np.ndarray,
  labeled: np.ndarray,
  number: int,
  labels: np.ndarray,
) -> dict[str, Any]:
  """The `number` surest guesses among the images that are not labeled.

  Args:
    probabilities: [N, K] of all training images.
    labeled: indices that are not candidates.
    number: how many, over all classes together (Algorithm 2).
    labels: [N], the truth, for the reported accuracy only; -1 where unknown.

  Returns:
    'index', 'label' and 'confidence' of each, and the 'accuracy' of the labels
    in percent, None where no truth is known.
  """
  confidence = probabilities.max(-1)
  confidence[labeled] = -1.0
  number = min(number, len(confidence) - len(labeled))
  # Stable: equal confidences are taken in the order of the images.
  index = np.sort(np.argsort(-confidence, kind='stable')[:number])
  label = probabilities[index].argmax(-1)
  known = labels[index] >= 0
  right = (label == labels[index])[known]
  return {
    'index': index.tolist(),
    'label': label.tolist(),
    'confidence': confidence[index].tolist(),
    'accuracy': round(100 * right.mean(), 2).item() if len(right) else None,
  }


def to_json(
  labeled: np.ndarray,
  labels: np.ndarray,
  num_classes: int,
  split_seed: int | None,
  source: str | os.PathLike = 'drawn',
) -> dict[str, Any]:
  """Returns what a run writes as split.json; `read` accepts it.

  `source` is 'drawn' or the path of the file that was read; `split_seed` is
  None for the latter.
  """
  return {
    'split_seed': split_seed,
    'source': os.fspath(source),
    'labeled': [int(index) for index in labeled],
    'per_class': _per_class(labeled, labels, num_classes).tolist(),
  }


def _per_class(labeled, labels, num_classes: int) -> np.ndarray:
  return np.bincount(labels[labeled], minlength=num_classes)


def _parse(path: str | os.PathLike) -> list[Any]:
  """Returns the entries of the file, of whatever type they are."""
  text = _text(pathlib.Path(path))
  if text[:1] not in ('[', '{'):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [
      int(line) if re.fullmatch(r'-?[0-9]{1,18}', line) else line
      for line in lines
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
        f"'labeled', but its keys are {_short(list(content))}."
      )
    content = content['labeled']
  return content


def _text(path: pathlib.Path) -> str:
  try:
    if not path.is_file():
      raise FileNotFoundError('not a file')
    with path.open('rb') as file:
      content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
      raise OSError(f'it is larger than {_MAX_BYTES} bytes')
    return content.decode('utf-8-sig').strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f'Labels file {path} cannot be read: {error}; give a text file of '
      'indices, or an empty path to draw the labels.'
    ) from error


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:60]}...'
