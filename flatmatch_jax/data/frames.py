"""Encoded images that behave like an array of decoded ones."""

import atexit
from typing import Any

import numpy as np

from flatmatch_jax.data import crops, records, sources
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
    self._iterator: Any = None
    self._at = (0, 0)  # The next slice of the iterator: start and length.

  def __len__(self) -> int:
    return len(self.records)

  @property
  def shape(self) -> tuple[int, int, int, int]:
    return (len(self), self.size, self.size, 3)

  def __getitem__(self, rows) -> 'np.ndarray | Frames':
    """Decoded images for a slice; for an array of indices, Frames again."""
    import tensorflow as tf

    if isinstance(rows, np.ndarray):
      return Frames(self.records.take(rows), self.size)
    if not isinstance(rows, slice) or rows.step not in (None, 1):
      raise TypeError(f'Frames give slices without a stride, not {rows}.')
    start, stop, _ = rows.indices(len(self))
    if start >= stop:
      return np.zeros((0, *self.shape[1:]), np.uint8)
    if self._at[0] != start or not self._fits(stop - start):
      self.close()
      self._iterator = self._open(start, stop - start)
      self._at = (start, stop - start)
    try:
      images = next(self._iterator)
    except tf.errors.OpError as error:
      self.close()
      self.find_fault(range(start, stop))
      raise UserError(
        f'Images {start} to {stop - 1} cannot be read: '
        f'{sources.one_line(error)}. A retry succeeded; restart the run.'
      ) from error
    self._at = (stop, self._at[1])
    if stop == len(self):
      self.close()
    return images

  def close(self) -> None:
    """Stops reading ahead."""
    self._at, self._iterator = (0, 0), None
    atexit.unregister(self.close)

  def _fits(self, length: int) -> bool:
    return length == min(self._at[1], len(self) - self._at[0])

  def _open(self, start: int, length: int):
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert  # Converting takes long.
    def image(i):
      read = lambda i: np.array(self.records.read(i), object)
      data = tf.numpy_function(read, [i], tf.string)
      data.set_shape(())
      return self._centre(data)

    # Python must not end while threads of TensorFlow call it.
    atexit.register(self.close)
    numbers = tf.data.Dataset.range(start, len(self))
    mapped = numbers.map(
      image, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return mapped.batch(length).prefetch(1).as_numpy_iterator()

  def _centre(self, data):
    boxes = lambda height, width: [crops.centre_box(height, width)]
    return crops.decode(data, boxes, self.size)[0]

  def find_fault(self, indices) -> None:
    """Decodes one by one; raises UserError that names the first failure."""
    import tensorflow as tf

    for i in indices:
      data = self.records.read(i)
      try:
        tf.io.decode_image(data, channels=3, expand_animations=False)
        self._centre(tf.constant(data))
      except tf.errors.OpError as error:
        raise UserError(
          f'Image {self.records.describe(i)} cannot be decoded: '
          f'{sources.one_line(error)}. Prepare the dataset again, or leave '
          'the image out.'
        ) from error
