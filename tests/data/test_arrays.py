"""An .npz file of the user's images is a dataset, or the error says why not."""

import io
import struct
import zipfile

import numpy as np
import pytest

from flatmatch_jax import data
from flatmatch_jax.system import memory
from flatmatch_jax.types import UserError


def content(**changes):
  """Six labeled images of three classes, five unlabeled, two for testing."""
  image = lambda n, first: np.broadcast_to(
    np.arange(first, first + n, dtype=np.uint8)[:, None, None, None],
    (n, 8, 9, 3),
  )
  full = {
    'labeled_images': image(6, 0),
    'labeled_labels': np.array([0, 1, 2, 2, 2, 1]),
    'unlabeled_images': image(5, 100),
    'test_images': image(2, 200),
    'test_labels': np.array([2, 0], np.uint8),
    'class_names': np.array(['ant', 'bee', 'cat']),
  }
  full |= changes
  return {key: value for key, value in full.items() if value is not None}


@pytest.fixture
def file(tmp_path):
  return tmp_path / 'own.npz'


def load(file, **changes):
  np.savez(file, **content(**changes))
  return data.load('npz', file)


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_rows_are_labeled_then_unlabeled(file, save):
  save(file, **content())
  dataset = data.load('npz', str(file))
  assert dataset.name == 'npz'
  assert dataset.class_names == ('ant', 'bee', 'cat')
  assert dataset.train_images.shape == (11, 8, 9, 3)
  values = dataset.train_images[:, 0, 0, 0].tolist()
  assert values == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104]
  assert dataset.train_labels.tolist() == [0, 1, 2, 2, 2, 1] + [-1] * 5
  assert dataset.test_images[:, 0, 0, 0].tolist() == [200, 201]
  assert dataset.test_labels.tolist() == [2, 0]
  assert dataset.train_images.dtype == dataset.test_images.dtype == np.uint8
  assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32


def test_test_and_names_are_optional(file):
  nothing = dict.fromkeys(('test_images', 'test_labels', 'class_names'))
  dataset = load(file, **nothing)
  assert dataset.class_names == ('0', '1', '2')
  assert dataset.test_images.shape == (0, 8, 9, 3)
  assert dataset.test_labels.shape == (0,)
  assert dataset.test_labels.dtype == np.int32


def test_grey_images_need_no_channel(file):
  grey = {
    name: content()[name][..., 0]
    for name in ('labeled_images', 'unlabeled_images')
  }
  grey['test_images'] = content()['test_images'][..., :1]
  dataset = load(file, **grey)
  assert dataset.train_images.shape == (11, 8, 9, 1)
  assert dataset.test_images.shape == (2, 8, 9, 1)


def test_columns_first_in_memory_is_the_same(file):
  images = np.random.default_rng(0).integers(0, 256, (5, 8, 9, 3), np.uint8)
  dataset = load(file, unlabeled_images=np.asfortranarray(images))
  np.testing.assert_array_equal(dataset.train_images[6:], images)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (
      {'labeled_images': None},
      "no array 'labeled_images' .*it holds: labeled_",
    ),
    ({'unlabeled_images': None}, "no array 'unlabeled_images'"),
    ({'labeled_labels': None}, "no array 'labeled_labels'"),
    ({'test_labels': None}, "no array 'test_labels'"),
    ({'test_images': None}, "no array 'test_images'"),
    ({'x': np.zeros(3)}, "'x' is none of labeled_images"),
    (
      {'labeled_images': np.zeros((6, 8, 9, 3))},
      'are float64 from 0 to 0, not uint8',
    ),
    ({'unlabeled_images': np.zeros((5, 8, 9, 4), np.uint8)}, '9, 4.* not .N'),
    ({'unlabeled_images': np.zeros((5, 8), np.uint8)}, r'\(5, 8\) are not'),
    ({'unlabeled_images': np.zeros((0, 8, 9, 3), np.uint8)}, 'at least one'),
    (
      {'unlabeled_images': np.zeros((5, 9, 9, 3), np.uint8)},
      'bring all to one',
    ),
    (
      {'test_images': np.zeros((2, 8, 9), np.uint8)},
      'test_images are of shape',
    ),
    (
      {'labeled_labels': np.array([0, 1, 2])},
      '3 labeled_labels for labeled_images of shape .6,',
    ),
    (
      {'test_labels': np.array([0])},
      '1 test_labels for test_images of shape .2,',
    ),
    ({'labeled_labels': np.arange(6.0)}, 'labeled_labels are float64'),
    ({'labeled_labels': np.zeros(6, bool)}, 'labeled_labels are bool'),
    ({'labeled_labels': np.zeros((6, 1), int)}, r'of shape \(6, 1\); one'),
    ({'labeled_labels': np.array([0, 1, 2, 3, 2, 1])}, 'run from 0 to 3, but'),
    ({'labeled_labels': np.array([0, 1, 2, -1, 2, 1])}, 'run from -1 to 2'),
    ({'test_labels': np.array([0, 3])}, 'test_labels run from 0 to 3, but'),
    (
      {'labeled_labels': np.array([0, 2, 2, 2, 2, 2])},
      r'class 1 \(bee\) has no',
    ),
    (
      {'labeled_labels': np.full(6, 2**62), 'class_names': None},
      'run up to .* only 6 images',
    ),
    (
      {'labeled_labels': np.zeros(6, int), 'class_names': None},
      'at least two are needed',
    ),
    ({'class_names': np.array(['a', 'a', 'b'])}, '2 different names of 3'),
    ({'class_names': np.arange(3)}, 'class_names are int64'),
    ({'class_names': np.array([['a', 'b', 'c']])}, r'of shape \(1, 3\)'),
    (
      {'class_names': np.array(['a', 'b', None])},
      "'class_names' is an array of",
    ),
  ],
)
def test_wrong_arrays_are_refused(file, changes, match):
  with pytest.raises(UserError, match=match) as caught:
    load(file, **changes)
  message = str(caught.value)
  assert message.startswith(f'{file} cannot be used: ')
  assert '\n' not in message


def test_objects_are_never_unpickled(file, tmp_path):
  """Unpickling this one would leave a file."""
  trace = tmp_path / 'trace'

  class Trap:
    def __reduce__(self):
      return trace.touch, ()

  with pytest.raises(UserError, match='Python objects, which are not loaded'):
    load(file, labeled_labels=np.array([Trap()] * 6, object))
  assert not trace.exists()


def cut(raw):
  return raw[: len(raw) // 2]


def flip(raw):
  at = raw.index(bytes([100] * 100))
  return raw[:at] + b'\1' + raw[at + 1 :]


def encrypt(raw):
  """Sets the flag of encryption in each entry of the directory and before."""
  raw = bytearray(raw)
  for magic, offset in ((b'PK\3\4', 6), (b'PK\1\2', 8)):
    at = -1
    while (at := raw.find(magic, at + 1)) >= 0:
      raw[at + offset] |= 1
  return bytes(raw)


@pytest.mark.parametrize(
  'damage', [cut, flip, encrypt, lambda raw: b'', lambda raw: b'not a zip']
)
def test_damaged_files_are_refused(file, damage):
  np.savez(file, **content())
  file.write_bytes(damage(file.read_bytes()))
  with pytest.raises(UserError, match=r'own\.npz cannot be used: '):
    data.load('npz', file)


def test_one_array_is_no_npz(file):
  with file.open('wb') as output:
    np.save(output, np.zeros(3))
  with pytest.raises(UserError, match=r'own\.npz cannot be used: '):
    data.load('npz', file)


@pytest.mark.parametrize('name', ['missing.npz', '', None])
def test_missing_file_is_named(tmp_path, name):
  with pytest.raises(
    UserError, match=r'no file .*--config\.data_dir=FILE\.npz'
  ):
    data.load('npz', name and tmp_path / name)


def test_shape_that_is_not_there_is_refused_before_room_is_made(
  file, monkeypatch
):
  """A header may promise petabytes in a hundred bytes."""
  header = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    header,
    {'shape': (2**40, 64, 64, 3), 'fortran_order': False, 'descr': '|u1'},
  )
  np.savez(file, **content(unlabeled_images=None))
  with zipfile.ZipFile(file, 'a') as output:
    output.writestr('unlabeled_images.npy', header.getvalue())
  monkeypatch.setattr(np, 'load', lambda *_, **__: pytest.fail('loaded'))
  with pytest.raises(UserError, match='does not have the size of its shape'):
    data.load('npz', file)


def test_unpacked_size_is_limited(file, monkeypatch):
  np.savez_compressed(file, **content())
  assert file.stat().st_size < 4000
  monkeypatch.setattr(memory, 'host_bytes', lambda: 2000)
  monkeypatch.setattr(np, 'load', lambda *_, **__: pytest.fail('loaded'))
  with pytest.raises(UserError, match='more than the'):
    data.load('npz', file)


def test_declared_sizes_are_those_of_the_headers(file):
  """The directory of the zip says less than what is packed."""
  np.savez_compressed(file, **content())
  raw = bytearray(file.read_bytes())
  at = raw.rfind(b'PK\1\2')  # The last entry of the directory.
  struct.pack_into('<I', raw, at + 24, 200)  # Its unpacked size.
  file.write_bytes(raw)
  with pytest.raises(UserError, match='does not have the size of its shape'):
    data.load('npz', file)


def test_declared_sizes_can_be_packed(file):
  """A terabyte in a kilobyte is a lie, and no room is made for it."""
  np.savez_compressed(file, **content())
  raw = bytearray(file.read_bytes())
  at = raw.rfind(b'PK\1\2')
  packed = struct.unpack_from('<I', raw, at + 20)[0]
  struct.pack_into('<I', raw, at + 24, 1032 * packed + 1)
  file.write_bytes(raw)
  with pytest.raises(UserError, match='larger than it can be'):
    data.load('npz', file)
