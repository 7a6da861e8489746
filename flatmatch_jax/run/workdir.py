"""The files of a run, each written whole or not at all."""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import socket
import tempfile

import ml_collections

from flatmatch_jax.run.settings import changes
from flatmatch_jax.system import buckets, distributed, files
from flatmatch_jax.system.files import writing
from flatmatch_jax.types import UserError

COMMITTED = 'commit_success.txt'  # Orbax writes it last, in buckets.
_MAX_METRICS = 2**28  # A run of the paper's length takes 2**23 bytes.

_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'ml_collections',
  'clu',
  'tensorflow-datasets',
  'numpy',
  'scikit-learn',
  'pillow',
)


class Workdir:
  """A run's folder: config, split, versions, metrics, result, checkpoints.

  Of several processes the first writes; see `distributed`.
  """

  def __init__(self, path: str):
    self.path = files.to_path(path)
    if not buckets.holds(path):
      self.path = self.path.expanduser().absolute()
    self.checkpoints = self.path / 'checkpoints'
    self.tensorboard = self.path / 'tensorboard'
    # Where its files grow; in a bucket they are put whole, as the rows are.
    self.events = self.tensorboard
    self._lease: buckets.Lease | None = None
    self._rows = ''
    self._put: dict[pathlib.Path, int] = {}

  def has(self, name: str) -> bool:
    return (self.path / name).exists()

  def read(self, name: str):
    """The content of a JSON file; UserError if it is not there or broken."""
    path = self.path / name
    try:
      return files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
      raise UserError(
        f'{self.path} is not the folder of a run: it has no {name}. Give the '
        '--workdir of a finished or running `python main.py`.'
      ) from None
    except buckets.UnreachableError:
      raise
    except (OSError, ValueError) as error:
      raise UserError(f'{path} is not valid JSON: {error}.') from None

  def write(self, name: str, content) -> None:
    """As JSON for people: lists of numbers stand in one line."""
    text = json.dumps(content, indent=2) + '\n'
    in_a_line = lambda match: ' '.join(match[0].split())
    # Only a list begins with a line's end: in texts they are escaped.
    self._write_text(name, re.sub(r'\[\n[^\[\]{}"]*\]', in_a_line, text))

  def _write_text(self, name, text):
    if not distributed.is_first():
      return
    with writing(self.path / name):
      files.make_folder(self.path, parents=True)
      with files.replacing(self.path / name, mode='w') as file:
        file.write(text)

  @contextlib.contextmanager
  def lock(self):
    """Makes sure that nobody else trains here, and that files can be written.

    The system holds the lock for this process: however it ends, it is free.
    Folders that stay empty are removed again. In a bucket it is a lease.
    """
    path = self.path / '.lock'
    holder = f'process {os.getpid()} on {socket.gethostname()}'
    if buckets.holds(path):
      with tempfile.TemporaryDirectory() as events:
        self.events = pathlib.Path(events)
        with writing(path):
          self._lease = buckets.Lease(path, holder)
        try:
          yield
        finally:
          self._lease.release()
      return
    new = [p for p in (self.path, *self.path.parents) if not p.exists()]
    with writing(path):
      self.path.mkdir(parents=True, exist_ok=True)
      # A link in a folder of others could lead to any file of ours.
      flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
      descriptor = os.open(path, flags, 0o666)
    with os.fdopen(descriptor, 'a+') as file:
      self._take(file)
      with writing(path):
        file.truncate(0)
        # Nothing is left to flush.
        os.write(file.fileno(), f'{holder}\n'.encode())
      try:
        yield
      finally:
        with contextlib.suppress(OSError):
          path.unlink()
          for folder in new:
            folder.rmdir()

  def _take(self, file):
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # Who had it before may have removed the file since it was opened.
      if os.fstat(file.fileno()).st_nlink:
        return
      holder = 'a process that is just ending'
    except BlockingIOError:
      file.seek(0)
      holder = file.read().strip() or 'another process'
    raise UserError(
      f'{self.path} is in use by {holder}. Wait until it ends, stop it, or use '
      'another --workdir.'
    )

  def config(self) -> ml_collections.ConfigDict:
    try:
      return ml_collections.ConfigDict(self.read('config.json'))
    except UserError:
      raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(
        f'{self.path / "config.json"} is not the config of a run: {error}; put '
        'back the one that main.py wrote.'
      ) from None

  def has_steps(self) -> bool:
    """Whether a run has saved anything here that could be lost."""
    return self.has('result.json') or bool(saved_steps(self.checkpoints))

  def check_config(self, config) -> None:
    """Raises UserError if the folder belongs to a run of another config."""
    with buckets.reading(self.path):
      is_file = self.path.exists() and not self.path.is_dir()
    if is_file:
      raise UserError(f'--workdir {self.path} is a file; name a folder.')
    if not self.has('config.json') or not self.has_steps():
      return
    different = changes(self.read('config.json'), config)
    if different:
      raise UserError(
        f'{self.path} holds a run with another config: '
        f'{", ".join(different)}. Use another --workdir, or the same config '
        'to go on.'
      )

  def metrics(self) -> list[dict]:
    """The rows of metrics.jsonl; a last line cut off by a crash is dropped.

    Any other that is damaged is a UserError: a resumed run would drop the rest.
    """
    path = self.path / 'metrics.jsonl'
    rows: list[dict] = []
    try:
      content = files.read_bytes(path, _MAX_METRICS)
    except FileNotFoundError:
      return rows
    except buckets.UnreachableError:
      raise
    except ValueError as error:
      raise UserError(
        f'{path} is {error}, which no run writes; shorten it.'
      ) from None
    lines = content.decode(errors='replace').splitlines()
    for number, line in enumerate(lines, 1):
      if (row := _row(line)) is not None:
        rows.append(row)
      elif number < len(lines):
        raise UserError(
          f'Line {number} of {path} is not a row of metrics; repair it, or '
          'remove it.'
        )
    return rows

  def cut_metrics(self, step: int) -> list[dict]:
    """Forgets rows after `step`, which a resumed run writes again.

    Returns the others: the same in all processes, whether the first has
    replaced the file by then or not.
    """
    rows = [row for row in self.metrics() if row['step'] <= step]
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    self._write_text('metrics.jsonl', text)
    self._rows = text
    return rows

  def append_metrics(self, row: dict) -> None:
    """Adds a row; what is not a number becomes null, as JSON has no NaN."""
    if not distributed.is_first():
      return
    row = {key: _finite(value) for key, value in row.items()}
    path, line = self.path / 'metrics.jsonl', json.dumps(row) + '\n'
    if buckets.holds(path):
      self._rows += line
      return
    with writing(path), path.open('a') as file:
      file.write(line)

  def sync_metrics(self) -> None:
    """To be called before a checkpoint: a power cut must not leave gaps.

    What comes after the checkpoint is computed again. In a bucket it appears
    only now, if the run still holds its lease.
    """
    if not distributed.is_first():
      return
    path = self.path / 'metrics.jsonl'
    if self._lease:
      with writing(self.path):
        self._lease.check()
      self._write_text('metrics.jsonl', self._rows)
      self.put_events()
      return
    with writing(path), path.open('a') as file:
      os.fsync(file.fileno())

  def put_events(self) -> None:
    """Puts what TensorBoard reads into the bucket, if it is not there."""
    if self._lease:
      with writing(self.tensorboard):
        buckets.upload(self.events, self.tensorboard, self._put)


def saved_steps(folder: pathlib.Path) -> list[int]:
  """Of all checkpoints in order; what Orbax began to write is not one.

  On a disk that has another name; in a bucket it lacks a last object.
  """
  if not buckets.holds(folder):
    found = list(folder.glob('[0-9]*'))
  else:
    with buckets.reading(folder):
      found = [path.parent for path in folder.glob(f'*/{COMMITTED}')]
  return sorted(int(path.name) for path in found if path.name.isdigit())


def versions() -> dict[str, str]:
  found = {'python': platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = 'not installed'
  return found


def _row(line: str) -> dict | None:
  """A row of metrics, or None where it is none."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return row if isinstance(row, dict) and type(row.get('step')) is int else None


def _finite(value):
  if isinstance(value, list):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
