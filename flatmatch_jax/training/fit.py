"""Trains from arrays in one call: `flatmatch_jax.fit(…)`."""

from collections.abc import Sequence
import contextlib
import functools
import os
import shutil
import signal
import tempfile
from typing import Any

import numpy as np

from flatmatch_jax import data
from flatmatch_jax.data import arrays as arrays_lib
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import buckets
from flatmatch_jax.system import files as files_lib
from flatmatch_jax.training import classifier, common, loop
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.types import UserError, check_known, shortened

_FILE = 'data.npz'  # In the workdir.


def fit(
  labeled_images: np.ndarray,
  labels: np.ndarray | Sequence[int],
  unlabeled_images: np.ndarray,
  *,
  test_images: np.ndarray | None = None,
  test_labels: np.ndarray | Sequence[int] | None = None,
  class_names: Sequence[str] | None = None,
  method: str = 'flatmatch',
  steps: int = 8_000,
  seed: int = 0,
  workdir: str | os.PathLike | None = None,
  **fields: Any,
) -> classifier.Classifier:
  """Trains a small, fast network and returns its classifier.

  Prints its progress on standard error. To end it early, interrupt it: the call
  with the workdir that it then names resumes.

  Args:
    labeled_images: uint8 [n, H, W, 3] in colour, or [n, H, W] in grey.
    labels: the class of each, as whole numbers from 0.
    unlabeled_images: uint8 [m, H, W, 3] or [m, H, W], of the same size.
    test_images: optional, to measure the error on; they are not learned from.
    test_labels: the class of each of those.
    class_names: by default the numbers.
    method: any of docs/settings.md, such as 'freematch' or 'supervised'.
    steps: of 16 labeled and 64 unlabeled images each.
    seed: of the weights and of all that is drawn.
    workdir: folder of the run on a disk, which `load` and all commands read.
      The same call resumes what was interrupted, and loads what is finished. By
      default a temporary one.
    **fields: any other field of docs/settings.md, such as flip=False,
      model='wrn_28_2' or recipe_args={'rho': 0.1}.
  """
  if workdir is not None and buckets.holds(workdir):
    raise UserError(
      f'fit cannot keep its arrays in {workdir}; use a folder on a disk as its '
      'workdir, and copy it when it is done.'
    )
  given: dict[str, Any] = {
    'labeled_images': labeled_images,
    'labeled_labels': labels,
    'unlabeled_images': unlabeled_images,
  }
  optional = {
    'test_images': test_images,
    'test_labels': test_labels,
    'class_names': class_names,
  }
  given |= {k: v for k, v in optional.items() if v is not None}
  try:
    arrays = {name: np.asarray(value) for name, value in given.items()}
    dataset = arrays_lib.from_arrays(arrays)
  except ValueError as error:
    reason = str(error).replace('labeled_labels', 'labels')
    raise UserError(f'fit cannot use its arrays: {reason}.') from None
  config = _make_config(dataset, method, seed, {'steps': steps, **fields})
  with contextlib.ExitStack() as closing:
    if workdir is None:
      workdir = tempfile.mkdtemp(prefix='flatmatch_jax-')
      closing.callback(shutil.rmtree, workdir, ignore_errors=True)
    files = Workdir(os.fspath(workdir))
    files.check_config(config)
    _check_data(files, dataset)
    config.data_dir = str(files.path / _FILE)
    prepare = functools.partial(_keep, files, arrays, dataset)
    try:
      loop.train_and_evaluate(config, str(files.path), prepare)
    except SystemExit as end:
      if end.code != 128 + signal.SIGINT:
        raise
      closing.pop_all()
      raise KeyboardInterrupt(
        f'call fit with workdir={str(files.path)!r} to resume'
      ) from None
    return classifier.load(files.path)


def _make_config(dataset, method, seed, fields):
  """The config of `configs/npz.py` with the fast settings, checked."""
  config = common.base(
    '',
    'npz',
    paper_labels=(),
    labels='all',
    fast='true',
    method=method,
    seed=seed,
    split_seed=seed,
  )
  common.set_own(config, min(dataset.train_images.shape[1:3]))
  config.data_dir, config.probe_every = _FILE, 0
  config.compilation_cache = ''  # The process, and its JAX, are the caller's.
  for name, value in fields.items():
    check_known('argument of fit', name, config)
    try:
      config.update({name: value})
    except (AttributeError, TypeError):
      raise UserError(
        f'{name}={shortened(value)} cannot take the place of '
        f'{shortened(config[name])}; docs/settings.md says what it may be.'
      ) from None
    if name == 'steps':  # It is the first.
      config.log_every = max(value // 20, 1)
  config_lib.check(config)
  return config


def _check_data(files: Workdir, dataset) -> None:
  """Raises UserError if the folder belongs to a run on other arrays."""
  if files.has_steps():
    there = files.read('dataset.json').get('fingerprint')
    if there != data.fingerprint(dataset):
      raise UserError(
        f'{files.path} holds a run on other arrays; use another workdir, or '
        'the same arrays to resume.'
      )


def _keep(files: Workdir, arrays, dataset) -> None:
  """Puts the arrays beside the run, where all commands find its data."""
  _check_data(files, dataset)  # Again: another may have trained meanwhile.
  path = files.path / _FILE
  if not path.exists() or not files.has_steps():
    with files_lib.writing(path), files_lib.replacing(path) as file:
      np.savez(file, **arrays)
