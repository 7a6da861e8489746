"""Encoded images that behave like an array of decoded ones."""

from collections.abc import Callable, Generator
import functools

import numpy as np

from flatmatch_jax.data import ahead, crops, records, sources
from flatmatch_jax.types import UserError


class Frames:
  """Images as the test sees them, decoded when a slice asks for them.

  Stands for an array [N, size, size, 3]: who takes slices in order, as
  `classify` does, finds the next one decoded in the background. The shorter
  side is scaled to 8/7 of `size`, and the centre cut out.
  """

  dtype = np.dtype(np.uint8)
  share = crops.SHARE  # Of the shorter side, in the centre.

  def __init__(self, images: records.Records, size: int):
    self.records, self.size = images, size
    self._iterator: Generator[np.ndarray, None, None] | None = None
    self._at = (0, 0)  # The next slice of the iterator: start and length.

  def __len__(self) -> int:
    return len(self.records)

  @property
  def shape(self) -> tuple[int, int, int, int]:
    return (len(self), self.size, self.size, 3)

  def __getitem__(self, rows) -> 'np.ndarray | Frames':
    """Decoded images for a slice; for an array of indices, Frames again."""
    if isinstance(rows, np.ndarray):
      return Frames(self.records.take(rows), self.size)
    if not isinstance(rows, slice) or rows.step not in (None, 1):
      raise TypeError(f'Frames give slices without a stride, not {rows}.')
    start, stop, _ = rows.indices(len(self))
    if start >= stop:
      return np.zeros((0, *self.shape[1:]), np.uint8)
    if self._iterator is None or not self._fits(start, stop - start):
      self._close()
      self._iterator = self._open(start, stop - start)
      self._at = (start, stop - start)
    try:
      images = next(self._iterator)
    except BaseException:
      self._close()
      raise
    self._at = (stop, self._at[1])
    if stop == len(self):
      self._close()
    return images

  def _close(self) -> None:
    """Stops reading ahead."""
    if self._iterator is not None:
      self._iterator.close()
    self._iterator = None

  def _fits(self, start: int, length: int) -> bool:
    at, usual = self._at
    return start == at and length == min(usual, len(self) - at)

  def _open(self, start: int, length: int):
    def fill(out, decode):
      image = decode()
      out[...] = crops.cut(image, crops.centre_box(*image.shape[:2]), self.size)

    def begin(at, submit):
      rows = range(at, min(at + length, len(self)))
      images = np.empty((len(rows), *self.shape[1:]), np.uint8)
      pairs = zip(images, self.start(rows), strict=True)
      return images, [submit(fill, *pair) for pair in pairs]

    return ahead.in_turns(begin, range(start, len(self), length))

  def start(self, rows) -> list[Callable[[], np.ndarray]]:
    """Begins to read images; each call decodes one, whole: uint8 [H, W, 3]."""
    reads = self.records.start(rows)
    return [
      functools.partial(self._decode, int(i), read)
      for i, read in zip(rows, reads, strict=True)
    ]

  def _decode(self, i: int, read: Callable[[], bytes]) -> np.ndarray:
    data = read()
    try:
      return crops.decode(data)
    except Exception as error:  # Each damaged file has its own type of error.
      raise UserError(
        f'Image {self.records.describe(i)} cannot be decoded: '
        f'{sources.one_line(error)}. Prepare the dataset again, or leave '
        'the image out.'
      ) from error
