"""Decoded images beside the files they come from.

An array and a JSON file in DATA_DIR/.flatmatch_jax, named by a digest of what
the pixels depend on: name, size and times of every file, the wanted shape, the
rule of reading and the version of Pillow. Another digest is another file, so
a changed image is never taken from here. Files are written whole or not at
all, and one that is damaged is not used.
"""

import hashlib
import json
import operator
import os
import pathlib
import time
import zlib

import numpy as np
import PIL

from flatmatch_jax.data import images
from flatmatch_jax.system import array_files, files, messages

FOLDER = '.flatmatch_jax'

_DAY = 24 * 60 * 60


def file_for(
  root: pathlib.Path,
  paths: list[pathlib.Path],
  shape: tuple[int, int, int],
) -> pathlib.Path:
  """Where the images of `paths` below `root` are stored, or would be."""
  digest = hashlib.sha256(f'{images.RULE} {PIL.__version__}'.encode())
  for path in paths:
    status = path.stat()
    # Nobody can set back the time of the last change of a file's entry.
    times = status.st_mtime_ns, status.st_ctime_ns
    digest.update(os.fsencode(path.relative_to(root)) + b'\0')
    digest.update(f'{status.st_size} {times} '.encode())
  size = 'x'.join(map(str, shape))
  return root / FOLDER / f'{size}-{digest.hexdigest()[:32]}.npy'


def load(
  file: pathlib.Path, number: int, shape: tuple[int, int, int]
) -> tuple[np.ndarray, dict[int, str]] | None:
  """The images of `number` files and what `read_into` returned of them.

  None if they are not stored, or damaged.
  """
  if not file.exists():
    return None
  try:
    about = files.read_json(file.with_suffix('.json'))
    unreadable = {operator.index(row): why for row, why in about['unreadable']}
    rows = number - len(unreadable)
    if not set(unreadable) <= set(range(number)) or not all(
      isinstance(why, str) for why in unreadable.values()
    ):
      raise ValueError('it tells of other images')
    with file.open('rb') as stored:
      header = array_files.npy_header('images', stored)
      if header != ((rows, *shape), False, np.uint8):
        raise ValueError('it holds other images')
      pixels = images.empty(rows, shape)
      if stored.readinto(pixels.reshape(-1).data) != pixels.size:
        raise ValueError('it is cut off')
    if zlib.crc32(pixels.data) != about['crc32']:
      raise ValueError('its checksum is wrong')
  except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
    messages.say(f'{file} is damaged ({error}); the images are read again.')
    return None
  return pixels, unreadable


def store(
  file: pathlib.Path, pixels: np.ndarray, unreadable: dict[int, str]
) -> None:
  """Writes the images, and removes older ones of the same size."""
  about = {
    'crc32': zlib.crc32(pixels.data),
    'unreadable': list(unreadable.items()),
  }
  try:
    file.parent.mkdir(exist_ok=True)
    with files.replacing(file) as output:
      np.save(output, pixels, allow_pickle=False)
    with files.replacing(file.with_suffix('.json')) as output:
      output.write(json.dumps(about).encode())
    size = file.name.partition('-')[0]
    for old in file.parent.glob(f'{size}-*'):
      # A temporary file may be another run's; after a day its run is dead.
      young = time.time() - old.stat().st_mtime < _DAY
      if old.stem != file.stem and not (old.suffix == '.tmp' and young):
        old.unlink(missing_ok=True)
  except OSError as error:
    messages.say(f'The decoded images are not kept for the next run: {error}.')
