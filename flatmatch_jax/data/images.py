"""Image files as arrays, by one rule for training and for prediction.

Photos are turned upright as their EXIF says; 16 bits keep the upper eight;
what is transparent shows white paper; colours become grey, or grey colours,
as the network wants it. An image of another size is scaled (bicubic) until it
just covers the wanted one, and cut to its centre. JPEGs much larger than that
are decoded at a fraction of their size, at least four times the wanted one.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import math
import os
import pathlib
import stat
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageOps

from flatmatch_jax.system import memory
from flatmatch_jax.types import UserError

try:
  import pillow_heif
except ImportError:  # It is optional.
  pillow_heif = None  # type: ignore[assignment]

EXTENSIONS = (
  *('.png', '.jpg', '.jpeg', '.webp', '.bmp', '.gif', '.tif', '.tiff'),
  *('.heic', '.heif'),
)
RULE = 1  # Raised when the same file would give other pixels.

# By content, whatever the name says; never one that starts another program.
FORMATS = ('PNG', 'JPEG', 'WEBP', 'BMP', 'GIF', 'TIFF')
_HEIC = (b'heic', b'heix', b'heim', b'heis', b'mif1', b'msf1')
_IGNORED = ('thumbs.db', 'desktop.ini', '__macosx')  # And all that hide.
_THREADS = min(os.cpu_count() or 1, 32)
_BLOCK = 1024
_GAP = 4

_MAX_PIXELS = 2**26  # A small file may hold a huge image.


class Found(NamedTuple):
  """What lies below a folder, in sorted order."""

  images: list[pathlib.Path]
  others: dict[pathlib.Path, str]  # Why each is not taken.


def find(folder: pathlib.Path, above: Sequence[pathlib.Path] = ()) -> Found:
  """Images at any depth, by their extension; hidden files are passed over.

  Links are followed, but no folder is entered twice, nor one of `above`.
  """
  found = Found([], {})
  seen = {_identity(path) for path in (folder, *above)}

  def enter(folder):
    for path in sorted(folder.iterdir()):
      if is_hidden(path):
        continue
      try:
        look_at(path)
      except OSError as error:  # Such as a link to nowhere.
        found.others[path] = error.strerror or str(error)

  def look_at(path):
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
      if (identity := _identity(path)) not in seen:
        seen.add(identity)
        enter(path)
    elif not stat.S_ISREG(mode):
      found.others[path] = 'not a regular file'
    elif path.suffix.lower() not in EXTENSIONS:
      found.others[path] = 'not an image by its name'
    else:
      found.images.append(path)

  try:
    enter(folder)
  except OSError as error:
    raise UserError(
      f'{folder} cannot be read: {error.strerror}; change its permissions, or '
      'name another folder.'
    ) from error
  return found


def is_hidden(path: pathlib.Path) -> bool:
  """Whether a file system put it there and not the user."""
  return path.name.startswith('.') or path.name.lower() in _IGNORED


def _identity(path):
  status = path.stat()
  return status.st_dev, status.st_ino


def decoders() -> str:
  """What the pixels of a file depend on besides the rule."""
  return f'{PIL.__version__} {pillow_heif and pillow_heif.__version__}'


def _open(path):
  """HEIC, whose decoder is optional, is not registered with Pillow for all."""
  try:
    return Image.open(path, formats=FORMATS)
  except Image.UnidentifiedImageError:
    with open(path, 'rb') as file:
      start = file.read(12)
    if start[4:8] != b'ftyp' or start[8:12] not in _HEIC:
      raise
  if not pillow_heif:
    raise ValueError('HEIC; to read it, pip install pillow-heif')
  return pillow_heif.HeifImageFile(path)


@contextlib.contextmanager
def opened(path: pathlib.Path, side: int) -> Iterator[Image.Image]:
  """An image file, upright; if much larger than `side`, perhaps decoded
  smaller, but not below it. ValueError says why it cannot be read."""
  try:
    with _open(path) as image:
      if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f'{image.width} x {image.height} pixels are too many')
      # Three times as fast for photos; pixels differ by a level or so.
      image.draft(None, (side, side))
      ImageOps.exif_transpose(image, in_place=True)
      yield image
  except Image.UnidentifiedImageError:
    raise ValueError(f'not one of {", ".join(FORMATS)}, HEIC') from None
  except Exception as error:  # Each damaged file has its own type of error.
    reason = ' '.join(str(error).split()) or type(error).__name__
    raise ValueError(reason[:200]) from error


def read(path: pathlib.Path, shape: tuple[int, int, int]) -> np.ndarray:
  """An image file as uint8 of `shape` [H, W, C]; ValueError says why not."""
  with opened(path, _GAP * max(shape[:2])) as image:
    return fit(image, shape)


def whole(path: pathlib.Path, side: int) -> Image.Image:
  """All of an image file in colour, at most `side` pixels wide and high."""
  with opened(path, side) as image:
    colours = convert(image, 'RGB')
    colours.thumbnail((side, side))
    return colours


def convert(image: Image.Image, mode: str) -> Image.Image:
  """With eight bits a channel, on white paper, in `mode` L or RGB."""
  if image.mode == 'F':
    raise ValueError('its pixels are floats; save it with 8 or 16 bits')
  if image.mode.startswith('I'):
    # Pillow clips 16 bits to 255 when it converts; keep the upper eight.
    upper = np.clip(np.asarray(image) >> 8, 0, 255)
    image = Image.fromarray(upper.astype(np.uint8))
  if image.has_transparency_data:
    image = image.convert('RGBA')
    paper = Image.new('RGBA', image.size, 'white')
    image = Image.alpha_composite(paper, image)
  return image.convert(mode)


def fit(image: Image.Image, shape: tuple[int, int, int]) -> np.ndarray:
  """Pixels of an image that is upright, as uint8 of `shape` [H, W, C]."""
  height, width, channels = shape
  image = convert(image, 'L' if channels == 1 else 'RGB')
  if image.size != (width, height):
    image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
  return np.asarray(image, np.uint8).reshape(shape)


def read_into(
  out: np.ndarray,
  paths: Sequence[pathlib.Path],
  advance: Callable[[], Any] = lambda: None,
) -> dict[int, str]:
  """Reads files into the rows of `out` [N, H, W, C] uint8, in parallel.

  Threads suffice: Pillow decodes and scales without Python's lock. `advance` is
  called after each file.

  Returns:
    For each row that could not be read, why; what is in it has no meaning.
  """

  def read_row(row):
    try:
      out[row] = read(paths[row], out.shape[1:])
    except ValueError as error:
      return str(error)
    return None

  complaints = {}
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    # In blocks: a future for each of a million files would fill the memory.
    for start in range(0, len(paths), _BLOCK):
      rows = range(start, min(start + _BLOCK, len(paths)))
      for row, complaint in zip(rows, pool.map(read_row, rows), strict=True):
        advance()
        if complaint:
          complaints[row] = complaint
  return complaints


def empty(number: int, shape: tuple[int, int, int]) -> np.ndarray:
  """Room for images; UserError where there is none.

  It begins at a multiple of 64 bytes: then JAX on a CPU takes the memory as it
  is and makes no second copy.
  """
  size = number * math.prod(shape)
  try:
    if size > memory.host_bytes():  # Linux would only say so later.
      raise MemoryError
    room = np.empty(size + 63, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].reshape(number, *shape)
  except MemoryError:
    raise UserError(
      f'{number} images of {shape[0]} x {shape[1]} take {memory.gib(size)}, '
      'more than there is memory; take a smaller image_size or fewer images.'
    ) from None
