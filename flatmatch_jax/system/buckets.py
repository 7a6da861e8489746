"""Folders in buckets of Google Cloud Storage, as gs://BUCKET/FOLDER.

Their paths have the methods of pathlib, by epath. What this package reads and
writes itself goes through TensorStore, an object at a time, whole, and with
conditions on what was there: epath's appends and caches are not needed.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import threading
import time
from typing import Any, cast

from flatmatch_jax.types import UserError

LEASE = 120  # Seconds for which a run that does not renew it holds a folder.
_RENEW = 30
# Of our own requests: most of a minute, with twice the pause each time.
_RETRIES: dict[str, Any] = {
  'max_retries': 6,
  'initial_delay': '1s',
  'max_delay': '16s',
}
# How TensorStore, TensorFlow and google-cloud-storage mention a response.
_STATUS = re.compile(
  r"http_response_code='(\d+)'|HTTP response code (\d+)|"
  r'^(\d{3}) (?:GET|POST|PUT|DELETE|PATCH) http'
)
_NO_STATUS = re.compile("curl_code='|libcurl code")
_REASONS = {
  '401': 'not logged in; see `gcloud auth application-default login`',
  '403': 'permission denied; this account needs the role Storage Admin there',
  '404': 'there is no such bucket or object',
  '429': 'a quota or rate of requests is exceeded',
}


class UnreachableError(UserError):
  """A bucket that does not answer, or refuses to."""


def holds(path: str | os.PathLike) -> bool:
  return str(path).startswith('gs://')


def to_path(text: str) -> pathlib.Path:
  """A path with the methods of pathlib that this package uses."""
  if not text.removeprefix('gs://').partition('/')[0]:
    raise UserError(f'{text} names no bucket; write gs://BUCKET/FOLDER.')
  try:
    found = importlib.util.find_spec('google.cloud.storage')
  except ModuleNotFoundError:
    found = None
  if not found:
    raise UserError(
      f'{text} is in a bucket, for which Orbax needs google-cloud-storage: '
      "pip install -e '.[gcs]' -c constraints.txt"
    )
  from etils import epath

  return cast(pathlib.Path, epath.Path(text))


def read(path: pathlib.Path) -> bytes:
  """A whole object; FileNotFoundError if there is none."""
  found = _read(path)
  if found.state != 'value':
    raise FileNotFoundError(2, 'No such object', str(path))
  return found.value


def put(path: pathlib.Path, content: bytes) -> None:
  """Writes an object, which appears whole or not at all."""
  _store(_folder(path)).write(path.name, content).result()


def upload(folder: pathlib.Path, target: pathlib.Path, known: dict) -> None:
  """Puts the files of a local folder whose size is not the `known` one."""
  for path in sorted(folder.rglob('*')):
    if path.is_file() and known.get(path) != (size := path.stat().st_size):
      put(target / str(path.relative_to(folder)), path.read_bytes())
      known[path] = size


def move(folder: pathlib.Path, target: pathlib.Path, last: str) -> None:
  """Copies all objects, then deletes: first `last`, by which it counts."""
  found = cast(Any, folder)  # An epath.Path, whose `walk` is of any Python.
  for place, _, names in found.walk():
    for name in names:
      (place / name).copy(target / (place / name).relative_to(folder))
  (folder / last).unlink(missing_ok=True)
  found.rmtree()


def why(error: BaseException) -> str:
  """What a client of the storage complains of, in words; '' for other errors.

  They have no class in common, and Orbax passes on their texts.
  """
  text = str(error)
  if match := _STATUS.search(text):
    status = match[1] or match[2] or match[3]
    if 'quota' in text.lower():
      status = '429'
    said = re.search(r'\\?"message\\?": \\?"(.+?)\\?"', text)
    reason = _REASONS.get(status, 'the storage does not answer')
    return f'{reason} ({status}{": " + said[1] if said else ""})'
  if type(error).__module__.startswith('google.auth'):
    return f'{_REASONS["401"]} ({" ".join(text.split())[:200]})'
  if _NO_STATUS.search(text):
    return 'the storage cannot be reached'
  return ''


def is_missing(reason: str) -> bool:
  """Whether `why` says that something is not there."""
  return reason.startswith(_REASONS['404'])


@contextlib.contextmanager
def reading(path: pathlib.Path):
  """Turns a failure of the storage, not of what is read, into one line."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    reason = why(error)
    if not reason or is_missing(reason):
      raise
    raise UnreachableError(
      f'Cannot read {path}: {reason}. Nothing was changed; the same command '
      'tries again.'
    ) from error


def _read(path):
  with reading(path):
    return _store(_folder(path)).read(path.name).result()


def _folder(path) -> str:
  return f'{path.parent}/'


@functools.cache
def _store(folder: str):
  import tensorstore

  bucket, _, rest = folder.removeprefix('gs://').partition('/')
  return tensorstore.KvStore.open(
    {
      'driver': 'gcs',
      'bucket': bucket,
      'path': rest,
      'context': {'gcs_request_retries': _RETRIES},
    }
  ).result()


def _parse(content: bytes) -> tuple[str, float]:
  """Who holds a lease and until when; nobody, if it is none that we know."""
  try:
    there = json.loads(content)
    return str(there['holder']), float(there['expires'])
  except (ValueError, TypeError, KeyError):
    return '', 0.0


class Lease:
  """Holds a folder for this process, as long as it lives, by an object in it.

  The object says who holds it and until when; a thread renews it. Every write
  has the condition that nobody else wrote since. If this process is paused for
  longer, another may take the folder: `check` finds that out afterwards, but
  what was being written meanwhile is not prevented.
  """

  def __init__(self, path: pathlib.Path, holder: str):
    """Takes it; UserError if another process holds it."""
    self._path, self._store = path, _store(_folder(path))
    self._holder = f'{holder} {os.urandom(4).hex()}'
    self._mutex, self._ended = threading.Lock(), threading.Event()
    found = _read(path)
    if found.state == 'value':
      self._refuse(found.value)
    self._generation = found.stamp.generation
    if not self._renew():
      self._refuse(read(path))
      raise self._taken('another process')
    self._thread = threading.Thread(target=self._keep, daemon=True)
    self._thread.start()

  def _refuse(self, content):
    holder, expires = _parse(content)
    if (left := expires - time.time()) > 0:
      at = time.strftime('%H:%M:%S UTC', time.gmtime(expires))
      raise self._taken(
        f'{holder.rpartition(" ")[0]}. If that run was killed, its lease '
        f'expires at {at}, in {left:.0f} s'
      )

  def _taken(self, holder):
    return UserError(
      f'{self._path.parent} is in use by {holder}. Wait until it ends, stop '
      'it, or use another --workdir.'
    )

  def _renew(self) -> bool:
    """Whether it is ours, for another while."""
    began, expires = time.monotonic(), time.time() + LEASE
    content = {'holder': self._holder, 'expires': expires}
    stamp = self._store.write(
      self._path.name,
      json.dumps(content).encode(),
      if_equal=self._generation,
    ).result()
    if not stamp.generation:
      found = _read(self._path)
      if _parse(found.value)[0] != self._holder:
        self._renewed = -math.inf  # So that `check` finds it, too.
        return False
      # It was us: the answer to an attempt, of now or before, was lost.
      self._generation = found.stamp.generation
      return self._renew()
    self._generation = stamp.generation
    self._renewed, self._expires = began, expires
    return True

  def _keep(self):
    while not self._ended.wait(_RENEW):
      with self._mutex, contextlib.suppress(Exception):  # `check` tells.
        if not self._renew():
          return

  def check(self) -> None:
    """Raises UserError if another process took it while this one paused."""
    with self._mutex:
      is_new = time.monotonic() - self._renewed < 2 * _RENEW
      # While the machine is suspended, only this clock goes on.
      if (is_new and time.time() < self._expires) or self._renew():
        return
    raise UserError(
      f'{self._path.parent} was taken by another process, because this one '
      f'could not renew its lease for {LEASE} s. It ends; the other goes on.'
    )

  def release(self) -> None:
    self._ended.set()
    self._thread.join()
    with contextlib.suppress(Exception):  # It expires.
      self._store.write(
        self._path.name, None, if_equal=self._generation
      ).result()
