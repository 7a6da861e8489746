"""Decoded images beside the files they come from.

Archives in DATA_DIR/.flatmatch_jax, each of some images, written while files
are decoded: what was interrupted resumes, and after a change only new files are
decoded. Those of DATA_DIR/FILE.csv are in a folder FILE.csv there. An image is
found by its key, a digest of what its pixels depend on: path, size and times of
its file, the wanted shape, the rule of reading and the version of the decoders.
A changed image has another key, so it is never taken from here. Archives are
written whole or not at all, and one that is damaged is not used.
"""

from collections.abc import Sequence
import contextlib
import hashlib
import math
import os
import pathlib
import time
import zipfile

import numpy as np

from flatmatch_jax.data import images
from flatmatch_jax.system import array_files, files, messages

FOLDER = '.flatmatch_jax'

_DAY = 24 * 60 * 60
_MOST = 1024  # Images in an archive,
_MOST_BYTES = 2**26  # and their pixels.


def read(
  root: pathlib.Path,
  paths: Sequence[pathlib.Path],
  shape: tuple[int, int, int],
  table: str = '',
) -> tuple[np.ndarray, dict[int, str]]:
  """The images of `paths`, from archives below `root` or from their files.

  Archives of other tables are read, too, but stay if theirs are other images.
  Returns uint8 [N, H, W, C], and of each row that could not be read, why.
  """
  keys = keys_of(root, paths, shape)
  pixels = images.empty(len(paths), shape)
  folder, size = root / FOLDER / table, 'x'.join(map(str, shape))
  done = _collect(root / FOLDER, folder, size, keys, pixels)
  left = [row for row in range(len(paths)) if row not in done]
  step = max(1, min(_MOST, _MOST_BYTES // math.prod(shape)))
  refusal = None
  with messages.progress('Decoding', len(paths), len(done)) as advance:
    for start in range(0, len(left), step):
      rows = left[start : start + step]
      block = np.zeros((len(rows), *shape), np.uint8)
      complaints = images.read_into(block, [paths[r] for r in rows], advance)
      why = [complaints.get(i, '') for i in range(len(rows))]
      pixels[rows] = block
      done |= zip(rows, why, strict=True)
      if not refusal:
        refusal = store(folder, size, [keys[r] for r in rows], block, why)
  if refusal:
    messages.say(
      f'The decoded images are not kept for the next run: {refusal}.'
    )
  return pixels, {row: done[row] for row in sorted(done) if done[row]}


def keys_of(
  root: pathlib.Path,
  paths: Sequence[pathlib.Path],
  shape: tuple[int, int, int],
) -> list[str]:
  """By what each image is found; OSError where a file is gone."""
  keys = []
  for path in paths:
    status = path.stat()
    # Nobody can set back the time of the last change of a file's entry.
    times = status.st_mtime_ns, status.st_ctime_ns
    rule = images.RULE, images.decoders(), shape
    digest = hashlib.sha256(f'{rule} {status.st_size} {times} '.encode())
    digest.update(os.fsencode(os.path.relpath(path, root)))
    keys.append(digest.hexdigest()[:32])
  return keys


def store(folder: pathlib.Path, size: str, keys, pixels, why) -> str | None:
  """Writes images [n, H, W, C] and why they are no images ('' if they are).

  Returns what prevents it.
  """
  name = hashlib.sha256(''.join(keys).encode()).hexdigest()[:32]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(folder / f'{size}-{name}.npz') as output:
      np.savez(output, keys=np.array(keys, 'S'), why=why, pixels=pixels)
  except OSError as error:
    return str(error)
  return None


def load(file: pathlib.Path) -> tuple[list[str], np.ndarray, list[str]] | None:
  """What `store` wrote: keys, pixels and `why`; None if it is damaged."""
  try:
    with zipfile.ZipFile(file) as archive:
      array_files.check_npz(archive)
    with np.load(file, allow_pickle=False) as stored:
      keys, why = stored['keys'], stored['why']
      pixels = stored['pixels']
    # Their names depend on the keys; of the rest zip files have checksums.
    rows = {len(keys), len(why), len(pixels)}
    if (keys.dtype.kind, why.dtype.kind) != ('S', 'U') or len(rows) > 1:
      raise ValueError('it holds something else')
    return [key.decode() for key in keys.tolist()], pixels, why.tolist()
  except (*array_files.BROKEN, KeyError, TypeError) as error:
    messages.say(f'{file} is damaged ({error}); its images are read again.')
    return None


def _collect(top, folder, size, keys, pixels) -> dict[int, str]:
  """Fills the rows of images that are stored; why each is none, or ''.

  Removes archives that are damaged, and from `folder` those mostly of images
  that are gone.
  """
  rows = {key: row for row, key in enumerate(keys)}
  done: dict[int, str] = {}
  archives: list[pathlib.Path] = []
  with contextlib.suppress(OSError):  # There is no such folder, or no way in.
    archives = sorted(top.rglob(f'{size}-*'))
  for file in archives:
    with contextlib.suppress(OSError):  # Others may still be read.
      age = time.time() - file.stat().st_mtime
      stored = load(file) if file.suffix == '.npz' else None
      found = []
      if stored and stored[1].shape[1:] == pixels.shape[1:]:
        found = [(i, rows[k]) for i, k in enumerate(stored[0]) if k in rows]
      others = file.parent != folder
      if stored and (others or 2 * len(found) >= len(stored[0])):
        for i, row in found:
          pixels[row], done[row] = stored[1][i], stored[2][i]
      # A temporary file may be another run's; after a day its run is dead.
      elif file.suffix != '.tmp' or age > _DAY:
        file.unlink()
  return done
