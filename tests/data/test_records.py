"""Records are found in files that have no index, and damage is named."""

import dataclasses
import io
import os
import shutil

from fuzzing import damaged, fuzz
import hypothesis
import numpy as np
import pytest
from tiny_imagenet import COUNTS, label_of, picture, prepare

from benchmarks import bucket_speed
from flatmatch_jax.data import records, sources
from flatmatch_jax.types import UserError


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  return prepare(tmp_path_factory.mktemp('imagenet'))


@pytest.fixture
def builder(prepared, tmp_path):
  """A copy that a test may damage, without an index."""
  folder = tmp_path / 'data'
  ignored = shutil.ignore_patterns('*.npz')
  source = os.path.dirname(os.path.dirname(prepared.data_dir))
  shutil.copytree(source, folder, ignore=ignored)
  return sources.import_tfds().builder('imagenet2012', data_dir=folder)


def stored(builder, split):
  """Images and labels in the order in which TFDS reads them."""
  import tensorflow_datasets as tfds

  data = builder.as_dataset(
    split=split,
    decoders={'image': tfds.decode.SkipDecoding()},
    read_config=tfds.ReadConfig(interleave_cycle_length=1),
  )
  pairs = [(x['image'], x['label']) for x in tfds.as_numpy(data)]
  return zip(*pairs, strict=True)


@pytest.mark.parametrize('split', COUNTS)
def test_every_record_is_the_original_in_the_order_of_tfds(builder, split):
  found = records.open_split(builder, split)
  images, labels = stored(builder, split)
  assert len(set(found.file_number)) == 3
  assert len(found) == COUNTS[split]
  assert [found.read(i) for i in range(len(found))] == list(images)
  assert found.labels.tolist() == list(labels)
  assert found.labels.dtype == np.int32
  originals = {picture(split, i): label_of(split, i) for i in range(len(found))}
  assert len(originals) == len(found)
  assert [originals[image] for image in images] == list(labels)
  assert found.class_names[:2] == ('n01440764', 'n01443537')


def test_image_that_changed_since_it_was_indexed_is_refused(builder):
  """Its file is as long as before, and a JPEG of wrong pixels can be read."""
  found = records.open_split(builder, 'train')
  path, start = found.files[found.file_number[5]], found.offset[5]
  with open(path, 'r+b') as file:
    file.seek(start + found.length[5] // 2)
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 1]))
  again = records.open_split(builder, 'train')
  with pytest.raises(UserError, match=r'Image 5 .*its checksum is wrong'):
    again.read(5)
  assert again.read(4) == found.read(4)


def test_bucket_gives_the_same_records(builder):
  """Neighbours in one request, others in requests of their own, all at once;
  what fails for a while is asked for again."""
  found = records.open_split(builder, 'train')
  folder = os.path.dirname(found.files[0])
  records._bucket.cache_clear()
  with bucket_speed.serving(folder, failures=1) as requests:
    remote = bucket_speed.in_bucket(found)
    assert remote.read(3) == found.read(3)
    assert len(requests) > len(set(requests)) == 1
    requests.clear()
    rows = [0, 1, 2, 15, 29]
    got = [read() for read in remote.start(rows)]
    assert got == [found.read(i) for i in rows]
    assert len(set(requests)) == 3  # The client may repeat one.
    changed = dataclasses.replace(remote, crc32=remote.crc32 + np.uint32(1))
    with pytest.raises(UserError, match=r'Image 5 .*gs://bucket/.*checksum'):
      changed.read(5)


def forbid(*_):
  raise AssertionError('The files were read again.')


def test_index_is_written_once_and_survives_a_move(
  builder, tmp_path, monkeypatch
):
  first = records.open_split(builder, 'train')
  shutil.move(tmp_path / 'data', tmp_path / 'moved')
  moved = sources.import_tfds().builder(
    'imagenet2012', data_dir=tmp_path / 'moved'
  )
  monkeypatch.setattr(records, '_scan', forbid)
  second = records.open_split(moved, 'train')
  assert 'moved' in second.files[0]
  for field in ('file_number', 'offset', 'length', 'crc32', 'labels'):
    np.testing.assert_array_equal(
      getattr(first, field), getattr(second, field), strict=True
    )
  assert second.read(5)


def test_unwritable_folder_leaves_the_index_in_the_cache(
  builder, tmp_path, monkeypatch
):
  index = os.path.join(builder.data_dir, 'imagenet2012-5.1.0-train.index.npz')
  os.makedirs(os.path.join(index, 'in the way'))
  records.open_split(builder, 'train', tmp_path / 'cache')
  assert len(list((tmp_path / 'cache').iterdir())) == 1
  assert not [name for name in os.listdir(builder.data_dir) if 'tmp' in name]
  monkeypatch.setattr(records, '_scan', forbid)
  assert len(records.open_split(builder, 'train', tmp_path / 'cache')) == 30


# What an index of others may claim of these files.
LIES = {
  'beyond the file': ('offset', 0, 10**6),
  'before the file': ('offset', 0, -1),
  'huge': ('length', 0, 2**62),
  'negative': ('length', 0, -1),
  'no such file': ('file_number', 0, 7),
  'another file': ('file_number', 0, 1),
  'no such class': ('labels', 0, 1000),
}


@pytest.mark.parametrize(
  'how', ['cut', 'noise', 'old', 'pickle', 'short', 'bomb', *LIES]
)
def test_index_that_cannot_serve_is_made_anew(builder, how):
  good = records.open_split(builder, 'train')
  path = os.path.join(builder.data_dir, 'imagenet2012-5.1.0-train.index.npz')
  with open(path, 'rb') as file:
    content = file.read()
  if how == 'cut':
    content = content[:-100]
  elif how == 'noise':
    content = b'no zip'
  else:
    file = io.BytesIO()
    columns = dict(np.load(path))
    if how == 'old':
      columns['sizes'][1] += 1
      columns['labels'][:] = 3
    elif how == 'short':
      columns['labels'] = columns['labels'][:-1]
    elif how == 'bomb':
      columns['more'] = np.zeros(10**7, np.int8)
    elif how in LIES:
      name, row, value = LIES[how]
      columns[name][row] = value
    else:
      columns['labels'] = np.array([None] * 30, object)
    save = np.savez_compressed if how == 'bomb' else np.savez
    save(file, **columns)
    content = file.getvalue()
  with open(path, 'wb') as file:
    file.write(content)
  again = records.open_split(builder, 'train')
  for name in ('file_number', 'offset', 'length', 'labels'):
    expected = getattr(good, name)
    np.testing.assert_array_equal(getattr(again, name), expected)
    np.testing.assert_array_equal(np.load(path)[name], expected)


def test_no_damage_of_an_index_is_believed(builder, tmp_path):
  good = records.open_split(builder, 'train')
  original = os.path.join(
    builder.data_dir, 'imagenet2012-5.1.0-train.index.npz'
  )
  with open(original, 'rb') as file:
    content = file.read()
  names, sizes = records._files(list(good.files))
  counts = builder.info.splits['train'].shard_lengths
  path = tmp_path / 'index.npz'

  @fuzz(150)
  @hypothesis.given(damaged([content]))
  def check(damaged):
    path.write_bytes(damaged)
    found = records._load(str(path), names, sizes, counts, 1000)
    if found is not None:  # What was damaged is not in use.
      for name, column in found.items():
        np.testing.assert_array_equal(column, getattr(good, name))

  check()


def damage(builder, function):
  """Changes the second file; returns its path."""
  path = builder.info.splits['train'].filepaths[1]
  path.write_bytes(function(bytearray(path.read_bytes())))
  return str(path)


def flip(at):
  def function(content):
    content[at] ^= 1
    return content

  return function


def second_record(content):
  return 16 + int.from_bytes(content[:8], 'little')


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (lambda x: x[:-100], r'Record 9 of .*00001-of-.* is damaged'),
    (flip(1), r'Record 0 of .*00001-of-.* is damaged'),  # A length.
    (flip(100), r'Record 0 of .*00001-of-.* is damaged'),  # Data.
    (lambda x: flip(second_record(x) + 20)(x), r'Record 1 of .* is damaged'),
    (lambda x: x[: second_record(x)], r'00001-of-.* holds 1 records.*says 10'),
    (lambda x: b'', r'holds 0 records.*says 10'),
  ],
)
def test_damage_is_named(builder, change, match):
  damage(builder, change)
  with pytest.raises(UserError, match=match):
    records.open_split(builder, 'train')


def test_missing_file_is_named(builder):
  os.remove(builder.info.splits['train'].filepaths[1])
  with pytest.raises(UserError, match=r'missing: .*00001-of-'):
    records.open_split(builder, 'train')


def test_file_that_changes_after_indexing_is_named(builder):
  found = records.open_split(builder, 'train')
  damage(builder, lambda x: x[:20])
  with pytest.raises(UserError, match=r'Image 12 .*00001-of-.* cannot be read'):
    found.read(12)


def test_other_split_and_other_format_are_refused(builder, tmp_path):
  with pytest.raises(UserError, match=r"no split 'test'; it has train, valid"):
    records.open_split(builder, 'test')
  pytest.importorskip('array_record')
  other = prepare(
    tmp_path, {'train': 2}, num_shards=1, file_format='array_record'
  )
  with pytest.raises(UserError, match=r"array_record.*file_format='tfrecord'"):
    records.open_split(other, 'train')


def test_selection_takes_classes_in_the_order_given(builder):
  found = records.open_split(builder, 'train')
  names = found.class_names
  chosen = found.select({'b': names[8], 'a': names[2]})
  assert chosen.class_names == ('b', 'a')
  kept = np.flatnonzero(np.isin(found.labels, (2, 8)))
  expected = np.where(found.labels[kept] == 8, 0, 1)
  np.testing.assert_array_equal(chosen.labels, expected)
  assert [chosen.read(i) for i in range(len(chosen))] == [
    found.read(i) for i in kept
  ]
  with pytest.raises(UserError, match=r"no class 'n0'.*like 'n01440764'"):
    found.select({'a': 'n0'})


def test_unknown_labels_belong_to_no_class(builder):
  found = records.open_split(builder, 'train')
  unknown = dataclasses.replace(found, labels=np.full(30, -1, np.int32))
  assert len(unknown.select({'a': found.class_names[-1]})) == 0
