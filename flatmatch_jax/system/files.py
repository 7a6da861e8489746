"""Files that are written whole or not at all, on disks and in buckets."""

from collections.abc import Iterator
import contextlib
import errno
import io
import json
import os
import pathlib
import stat
from typing import Any

from flatmatch_jax.system import buckets
from flatmatch_jax.types import UserError

_MAX_JSON = 2**26  # A split of ImageNet takes 2**24 bytes.

# What a disk says that is full, or not ours to write to.
_REFUSALS = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EFBIG,
  errno.EROFS,
  errno.EACCES,
  errno.EIO,
)


def to_path(text: str | os.PathLike) -> pathlib.Path:
  """A path on a disk, or in a bucket."""
  text = str(text)
  if buckets.holds(text):
    return buckets.to_path(text)
  if '://' in text:
    raise UserError(
      f'{text} is not a folder: of all buckets only gs://… are supported. Name '
      'one of these, or a folder on a disk that all machines share.'
    )
  return pathlib.Path(text)


def make_folder(path: pathlib.Path, parents: bool = False) -> None:
  """Buckets have none: there are only objects, whose names have slashes."""
  if not buckets.holds(path):
    path.mkdir(parents=parents, exist_ok=True)


def common_folder(paths: list[pathlib.Path]) -> pathlib.Path:
  """The nearest one that has all of them in it."""
  shared = os.path.commonpath([os.path.join(*path.parts) for path in paths])
  return type(paths[0])(shared)  # epath has gs:// as the folder /gs.


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode='wb', **options) -> Iterator[Any]:
  """Opens a file that takes the place of `path` when it is complete.

  `mode` and `options` are those of `open`. Whatever goes wrong, there is the
  old file, or the new one whole, and nothing else is left.
  """
  if buckets.holds(path):
    content = io.BytesIO()
    file = content if 'b' in mode else io.TextIOWrapper(content, **options)
    yield file
    file.flush()
    buckets.put(to_path(path), content.getvalue())
    return
  path = pathlib.Path(path)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  # Made anew: in a folder of many users it could be a link to elsewhere.
  temporary.unlink(missing_ok=True)
  try:
    with temporary.open(mode.replace('w', 'x'), **options) as file:
      yield file
      file.flush()
      os.fsync(file.fileno())  # Or the name could be on disk before this.
    temporary.replace(path)
    sync_folder(path.parent)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def writing(path: pathlib.Path):
  """Turns what a disk refuses into a line that says what to do."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    # Orbax passes on errors of tensorstore, which are a text only.
    texts = map(os.strerror, _REFUSALS)
    reason = next((text for text in texts if text in str(error)), '')
    if isinstance(error, OSError):
      reason = error.strerror or str(error)
    reason = buckets.why(error) or reason
    if not reason:
      raise
    raise UserError(
      f'Cannot write {path}: {reason}. What was saved before is intact; when '
      'there is space and permission to write, the same command resumes.'
    ) from error


def sync_folder(path: pathlib.Path) -> None:
  """Makes names that were given to files in it survive a power cut."""
  try:
    folder = os.open(path, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)
  except OSError as error:
    # Not every file system can, and not every folder can be read.
    if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
      raise


def read_bytes(path: pathlib.Path, most: int) -> bytes:
  """The content of a file; ValueError if it has more than `most` bytes."""
  if buckets.holds(path):
    return _at_most(buckets.read(path), most)
  with path.open('rb') as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise ValueError('not a regular file')
    return _at_most(file.read(most + 1), most)


def _at_most(content, most):
  if len(content) > most:
    raise ValueError(f'larger than {most} bytes')
  return content


def read_json(path: pathlib.Path) -> Any:
  """The content of a JSON file; OSError or ValueError if it has none."""
  try:
    return json.loads(read_bytes(path, _MAX_JSON))
  except RecursionError:
    raise ValueError('nested too deeply') from None


def check_target(option: str, path: str) -> None:
  """Raises UserError, before any work, where no file can be put at `path`.

  In a bucket that is known only when it is put.
  """
  if buckets.holds(path):
    to_path(path)
    return
  folder = pathlib.Path(path).absolute().parent
  if os.path.exists(path) and not os.path.isfile(path):
    raise UserError(f'{option} {path} is a folder or device; name a file.')
  if not folder.is_dir():
    raise UserError(f'Cannot write {option} {path}: there is no {folder}.')
  if not os.access(folder, os.W_OK):
    raise UserError(
      f'Cannot write {option} {path}: {folder} is not writable; name another.'
    )
