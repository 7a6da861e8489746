"""Random access to the TFRecord files that TFDS prepares.

Such files have no index, so they are read through once, which also checks
every checksum; where each record lies, its label and a checksum that Python can
compute fast are kept in an .npz beside them. ImageNet's 140 GB take as long as
the disk needs, and after that seconds.
"""

from collections.abc import Callable, Mapping
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import os
import zipfile
import zlib

import numpy as np
from tqdm import tqdm

from flatmatch_jax.data import sources
from flatmatch_jax.system import array_files, messages
from flatmatch_jax.types import UserError

_FRAME = 16  # Bytes around a record: length, its checksum, data's checksum.
_HEADER = 12  # Those of them that precede the data.
_COLUMNS = {
  'file_number': np.int32,
  'offset': np.int64,
  'length': np.int64,
  'crc32': np.uint32,
  'labels': np.int32,
}
_BATCH = 64
_THREADS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """The records of a split in the order of TFDS, or a selection of them."""

  files: tuple[str, ...]
  file_number: np.ndarray  # [N], into `files`.
  offset: np.ndarray  # [N], of the first byte of the data.
  length: np.ndarray  # [N], in bytes.
  crc32: np.ndarray  # [N], of the data.
  labels: np.ndarray  # [N] int32, -1 where unknown.
  class_names: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.labels)

  def read(self, i: int) -> bytes:
    """The encoded image of record `i`; threads may read at the same time."""
    return self.start([i])[0]()

  def start(self, rows) -> list[Callable[[], bytes]]:
    """Begins to read records; each call gives one image.

    Of a bucket all are on their way at once: TensorStore joins neighbours and
    repeats, after growing pauses, what fails for a while. A disk's are read
    when they are called for.
    """
    import tensorstore

    with tensorstore.Batch() as batch:  # Sent at its end.
      data = [self._data(int(i), batch) for i in rows]
    return [
      functools.partial(self._image, int(i), get)
      for i, get in zip(rows, data, strict=True)
    ]

  def _data(self, i: int, batch) -> Callable[[], bytes]:
    path = self.files[self.file_number[i]]
    offset, length = int(self.offset[i]), int(self.length[i])
    if path.startswith('gs://'):
      bucket, key = path.removeprefix('gs://').split('/', 1)
      part = slice(offset, offset + length)
      found = _bucket(bucket).read(key, byte_range=part, batch=batch)
      return lambda: found.result().value

    def read():
      # Opened each time: a thousand files are more than a process may hold.
      with open(path, 'rb', buffering=0) as local:
        return os.pread(local.fileno(), length, offset)

    return read

  def _image(self, i: int, get: Callable[[], bytes]) -> bytes:
    from google.protobuf import message
    import tensorflow as tf

    try:
      data = get()
      if zlib.crc32(data) != self.crc32[i]:
        raise ValueError('its checksum is wrong')
      example = tf.train.Example.FromString(data)
      (image,) = example.features.feature['image'].bytes_list.value
    except (OSError, RuntimeError, message.DecodeError, ValueError) as e:
      raise UserError(
        f'Image {self.describe(i)} cannot be read: {sources.one_line(e)}. '
        'If the file has changed since it was indexed, prepare the dataset '
        'again.'
      ) from e
    return image

  def describe(self, i: int) -> str:
    return f'{i} (byte {self.offset[i]} of {self.files[self.file_number[i]]})'

  def select(self, classes: Mapping[str, str]) -> 'Records':
    """Those of some classes, numbered in the order of `classes`.

    `classes` maps the names to be shown to the names that the dataset has.
    """
    number = {name: i for i, name in enumerate(self.class_names)}
    absent = [name for name in classes.values() if name not in number]
    if absent:
      raise UserError(
        f'The dataset has no class {absent[0]!r} ({len(absent)} of '
        f'{len(classes)} are absent); its names are like '
        f'{self.class_names[0]!r}.'
      )
    new = np.full(len(number) + 1, -1, np.int32)  # The last one is for -1.
    new[[number[name] for name in classes.values()]] = np.arange(len(classes))
    labels = new[self.labels]
    named = dataclasses.replace(self, labels=labels, class_names=tuple(classes))
    return named.take(np.flatnonzero(labels >= 0))

  def take(self, rows) -> 'Records':
    """Those at `rows`, a list or range, such as one process's part."""
    rows = np.asarray(rows, np.int64)
    kept = {name: getattr(self, name)[rows] for name in _COLUMNS}
    return dataclasses.replace(self, **kept)


@functools.cache
def _bucket(name: str):
  """Google Cloud Storage, in which reads wait for nothing."""
  import tensorstore

  return tensorstore.KvStore.open(f'gs://{name}/').result()


def open_split(
  builder, split: str, cache_dir: str | os.PathLike | None = None
) -> Records:
  """Indexes a split of a prepared TFDS builder, or reads its index.

  The index goes to `cache_dir` if the folder of the data is not writable.
  """
  paths = _paths(builder, split)
  counts = builder.info.splits[split].shard_lengths
  names, sizes = _files(paths)
  folders = [os.fspath(builder.data_dir)]
  folders += [os.path.expanduser(cache_dir)] if cache_dir else []
  file = f'{builder.info.full_name.replace("/", "-")}-{split}.index.npz'
  indices = [os.path.join(folder, file) for folder in folders]
  classes = tuple(builder.info.features['label'].names)
  found = (_load(i, names, sizes, counts, len(classes)) for i in indices)
  columns = next(filter(None, found), None)
  if columns is None:
    messages.say(
      f'Reading all {len(paths)} files of {builder.info.full_name}, split '
      f'{split!r}, to index them ({sizes.sum() / 1e9:.1f} GB, only once).'
    )
    columns = _scan(paths, counts)
    _save(indices, columns | {'names': names, 'sizes': sizes})
  return Records(files=tuple(paths), class_names=classes, **columns)


def _paths(builder, split: str) -> list[str]:
  """The files of a split in TFDS's order; UserError if they cannot serve."""
  info = builder.info
  if split not in info.splits:
    raise UserError(
      f'{info.full_name} in {builder.data_dir} has no split {split!r}; it has '
      f'{", ".join(info.splits)}.'
    )
  if info.file_format.value != 'tfrecord':
    raise UserError(
      f'{info.full_name} in {builder.data_dir} is stored as '
      f'{info.file_format.value}, but only TFRecord files can be streamed; '
      f"prepare it with tfds.builder('{info.name}', file_format='tfrecord')"
      '.download_and_prepare().'
    )
  return [os.fspath(path) for path in info.splits[split].filepaths]


def _files(paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
  """Names and sizes, by which an index knows its files."""
  import tensorflow as tf

  try:
    sizes = [tf.io.gfile.stat(path).length for path in paths]
  except tf.errors.OpError as error:
    raise UserError(
      f'A file of the dataset is missing: {error.message}. Prepare the dataset '
      'again, or copy its whole folder.'
    ) from error
  return np.array([os.path.basename(path) for path in paths]), np.array(sizes)


def _scan(paths: list[str], counts: list[int]) -> dict[str, np.ndarray]:
  """Reads all files; returns the columns of Records, each [N]."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    scans = pool.map(_scan_file, paths, counts)
    try:
      parts = list(tqdm(scans, 'indexing', len(paths), disable=None))
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  lengths, sums, labels = map(np.concatenate, zip(*parts, strict=True))
  starts = [np.cumsum(p[0] + _FRAME) - p[0] - _FRAME for p in parts]
  return {
    'file_number': np.repeat(np.arange(len(paths), dtype=np.int32), counts),
    'offset': np.concatenate(starts) + _HEADER,
    'length': lengths,
    'crc32': sums,
    'labels': labels,
  }


def _scan_file(path: str, count: int) -> tuple[np.ndarray, ...]:
  """Lengths, checksums and labels [n]; TensorFlow checks its own checksums."""
  import tensorflow as tf

  file = tf.data.TFRecordDataset(path, buffer_size=2**22)
  label = {'label': tf.io.FixedLenFeature([], tf.int64)}
  lengths, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
  sums: list[int] = []
  try:
    for batch in file.batch(_BATCH):
      lengths.append(tf.strings.length(batch).numpy().astype(np.int64))
      sums += map(zlib.crc32, batch.numpy())
      parsed = tf.io.parse_example(batch, label)['label']
      labels.append(parsed.numpy().astype(np.int32))
  except tf.errors.OpError as error:
    number, message = _first_damaged(file, label)
    raise UserError(
      f'Record {number} of {path} is damaged: {message or error.message}. '
      'Copy the file again, or prepare the dataset again.'
    ) from error
  found = sum(map(len, lengths))
  if found != count:
    raise UserError(
      f'{path} holds {found} records, but dataset_info.json says {count}; copy '
      'the file again, or prepare the dataset again.'
    )
  checksums = np.array(sums, np.uint32)
  return np.concatenate(lengths), checksums, np.concatenate(labels)


def _first_damaged(file, label) -> tuple[int, str]:
  """The number of the first record that fails, and why it does."""
  import tensorflow as tf

  number = 0
  try:
    for record in file:
      tf.io.parse_single_example(record, label)
      number += 1
  except tf.errors.OpError as error:
    return number, error.message
  return number, ''


def _load(
  path: str, names, sizes, counts, num_classes: int
) -> dict[str, np.ndarray] | None:
  """An index; None if it is absent, damaged or of other files."""
  import tensorflow as tf

  # 28 bytes a record; more for names, and for eight headers.
  room = 32 * sum(counts) + 2 * (names.nbytes + sizes.nbytes) + 2**16
  try:
    with tf.io.gfile.GFile(path, 'rb') as file:
      raw = io.BytesIO(file.read(room))
    with zipfile.ZipFile(raw) as archive:
      if sum(info.file_size for info in archive.infolist()) > room:
        return None
      array_files.check_npz(archive)
    raw.seek(0)
    content = np.load(raw, allow_pickle=False)
    for name, wanted in (('names', names), ('sizes', sizes)):
      if not np.array_equal(content[name], wanted):
        return None
    columns = {name: content[name] for name in _COLUMNS}
  except (tf.errors.OpError, *array_files.BROKEN, KeyError):
    return None
  return columns if _fits(columns, sizes, counts, num_classes) else None


def _fits(columns, sizes, counts, num_classes) -> bool:
  """Whether records lie where they can: an index may come from others."""
  if any(
    column.shape != (sum(counts),) or column.dtype != _COLUMNS[name]
    for name, column in columns.items()
  ):
    return False
  file_number, offset, length, _, labels = columns.values()
  numbers = np.repeat(np.arange(len(counts)), counts)
  return bool(
    np.array_equal(file_number, numbers)
    and np.all((offset >= _HEADER) & (length >= 0) & (length <= sizes.max()))
    and np.all(offset <= sizes[numbers] - length)
    and np.all((labels >= -1) & (labels < num_classes))
  )


def _save(paths: list[str], columns: dict[str, np.ndarray]) -> None:
  """Writes the index to the first of `paths` that can be written."""
  import tensorflow as tf

  content = io.BytesIO()
  np.savez(content, **columns)  # type: ignore[arg-type]
  for path in paths:
    part = f'{path}.{os.getpid()}.tmp'  # Several processes may write at once.
    try:
      tf.io.gfile.makedirs(os.path.dirname(path))
      with tf.io.gfile.GFile(part, 'wb') as file:
        file.write(content.getvalue())
      tf.io.gfile.rename(part, path, overwrite=True)
      return
    except (tf.errors.OpError, OSError):
      with contextlib.suppress(tf.errors.OpError, OSError):
        tf.io.gfile.remove(part)
  messages.say(
    f'The index is not kept for the next run: none of {", ".join(paths)} can '
    'be written.'
  )
