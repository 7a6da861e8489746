"""Every source gives the same rows in the same order, or says why not."""

import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from flatmatch_jax import data
from flatmatch_jax.data import sources
from flatmatch_jax.types import UserError

CODES = {'train': 1, 'test': 2, 'extra': 3, 'unlabelled': 4}
NAMES = [f'name{i}' for i in range(10)]


def image(split, i, size):
  """An image whose bytes name its split and number."""
  pixels = np.zeros((size, size, 3), np.uint8)
  pixels[..., 0], pixels[..., 1], pixels[..., 2] = CODES[split], i, 255 - i
  return pixels


def prepare(folder, name, counts, example, names=NAMES, num_shards=None):
  """Writes a small dataset with the real TFDS builder of that name."""
  tfds = sources._import_tfds()
  builder = tfds.builder(name, data_dir=folder)
  splits = {
    split: [(i, example(split, i)) for i in range(count)]
    for split, count in counts.items()
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      type(builder),
      '_split_generators',
      lambda self, *args, **kwargs: {k: iter(v) for k, v in splits.items()},
    )
    if names:
      builder.info.features['label'].names = names
    tfds.display_progress_bar(False)
    builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(num_shards=num_shards)
    )
  return builder


def cifar(split, i):
  return {
    'id': f'{split}_{i:05d}',
    'image': image(split, i, 32),
    'label': i % 10,
  }


def stored(builder, split):
  """Second channels of a split's images, record after record."""
  import tensorflow as tf

  files = sorted(str(path) for path in builder.data_path.glob(f'*-{split}.*'))
  features = builder.info.features
  return [
    int(features.deserialize_example(record)['image'][0, 0, 1])
    for record in tf.data.TFRecordDataset(files)
  ]


@pytest.fixture(scope='module')
def cifar_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('cifar')
  builder = prepare(folder, 'cifar10', {'train': 40, 'test': 20}, cifar)
  assert stored(builder, 'train') != list(range(40))  # TFDS shuffles.
  return folder


@pytest.fixture
def no_network(monkeypatch):
  """Makes every host unknown; returns the list of those asked for."""
  asked = []

  def getaddrinfo(host, *args, **kwargs):
    asked.append(host)
    raise socket.gaierror(-2, 'Name or service not known')

  monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
  return asked


def test_import_needs_no_tensorflow():
  code = (
    'import sys, flatmatch_jax.data, flatmatch_jax.data.splits\n'
    'print({"tensorflow", "tensorflow_datasets", "sklearn"} & set(sys.modules))'
  )
  result = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert result.stdout.strip() == 'set()'


def test_unknown_dataset_lists_the_known():
  with pytest.raises(ValueError, match=r"'mnist'.*digits, cifar10.*stl10"):
    data.load('mnist')


def test_digits_are_1437_and_360_without_overlap():
  digits = data.load('digits')
  assert digits.train_images.shape == (1437, 8, 8, 1)
  assert digits.test_images.shape == (360, 8, 8, 1)
  assert digits.train_labels.shape == (1437,)
  assert digits.test_labels.shape == (360,)
  assert digits.train_images.dtype == digits.test_images.dtype == np.uint8
  assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
  assert digits.class_names == tuple('0123456789')
  train = {x.tobytes() for x in digits.train_images}
  test = {x.tobytes() for x in digits.test_images}
  assert (len(train), len(test)) == (1437, 360)  # No image occurs twice.
  assert not train & test


def test_digits_are_those_of_the_file():
  from sklearn import datasets

  bunch = datasets.load_digits()
  order = np.random.RandomState(0).permutation(1797)
  assert order[:5].tolist() == [1081, 1707, 927, 713, 262]
  digits = data.load('digits')
  test, train = np.sort(order[:360]), np.sort(order[360:])
  np.testing.assert_array_equal(digits.test_labels, bunch.target[test])
  np.testing.assert_array_equal(digits.train_labels, bunch.target[train])
  for images, rows in (
    (digits.train_images, train),
    (digits.test_images, test),
  ):
    scaled = images[..., 0] * (16 / 255)
    np.testing.assert_allclose(scaled, bunch.images[rows], atol=0.04)
  assert set(np.unique(digits.train_images)) >= {0, 16, 128, 255}


def test_ids_restore_the_official_order(cifar_dir, no_network):
  dataset = data.load('cifar10', str(cifar_dir))
  assert dataset.name == 'cifar10'
  assert dataset.class_names == tuple(NAMES)
  for split, images, labels in (
    ('train', dataset.train_images, dataset.train_labels),
    ('test', dataset.test_images, dataset.test_labels),
  ):
    expected = np.stack([image(split, i, 32) for i in range(len(labels))])
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, np.arange(len(labels)) % 10)
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
  assert (len(dataset.train_labels), len(dataset.test_labels)) == (40, 20)
  assert not no_network


def test_cifar100_has_fine_labels_and_default_names(tmp_path):
  def example(split, i):
    return cifar(split, i) | {'label': 99 - i, 'coarse_label': i % 20}

  prepare(tmp_path, 'cifar100', {'train': 30, 'test': 10}, example, names=None)
  dataset = data.load('cifar100', tmp_path)
  np.testing.assert_array_equal(dataset.train_labels, 99 - np.arange(30))
  assert dataset.class_names == tuple(str(i) for i in range(100))


def test_svhn_is_train_then_extra(tmp_path):
  def example(split, i):
    return cifar(split, i) | {'id': f'{split}_{i:06d}'}

  counts = {'train': 30, 'test': 10, 'extra': 50}
  prepare(tmp_path, 'svhn_cropped', counts, example)
  dataset = data.load('svhn', tmp_path)
  assert dataset.name == 'svhn'
  expected = [image('train', i, 32) for i in range(30)]
  expected += [image('extra', i, 32) for i in range(50)]
  np.testing.assert_array_equal(dataset.train_images, np.stack(expected))
  labels = np.concatenate([np.arange(30), np.arange(50)]) % 10
  np.testing.assert_array_equal(dataset.train_labels, labels)
  assert len(dataset.test_labels) == 10


def test_stl10_is_labeled_then_unlabeled_in_file_order(tmp_path):
  def example(split, i):
    label = -1 if split == 'unlabelled' else i % 10
    return {'image': image(split, i, 96), 'label': label}

  # Shards above 16 examples, the length of a block of TFDS's interleaving.
  counts = {'train': 40, 'test': 10, 'unlabelled': 60}
  builder = prepare(tmp_path, 'stl10', counts, example, num_shards=2)
  train, unlabeled = stored(builder, 'train'), stored(builder, 'unlabelled')
  dataset = data.load('stl10', tmp_path)
  assert dataset.train_images.shape == (100, 96, 96, 3)
  assert dataset.train_images[:, 0, 0, 1].tolist() == train + unlabeled
  assert dataset.train_images[:, 0, 0, 0].tolist() == [1] * 40 + [4] * 60
  assert dataset.train_labels[:40].tolist() == [i % 10 for i in train]
  assert dataset.train_labels[40:].tolist() == [-1] * 60
  assert dataset.test_labels.min() == 0


@pytest.mark.parametrize('name', ['cifar10', 'svhn', 'stl10'])
def test_absent_dataset_fails_soon_and_says_what_to_run(
  name, tmp_path, no_network, capsys
):
  folder = tmp_path / 'absent'
  with pytest.raises(UserError) as caught:
    data.load(name, folder)
  message = str(caught.value)
  assert f'is not prepared in {folder}' in message
  assert 'ConnectionError' in message
  assert f'data_dir="{folder}").download_and_prepare()' in message
  assert '\n' not in message
  assert 1 <= len(no_network) <= 9  # At most 3 files, 3 times each.
  assert capsys.readouterr().out == ''


def test_folder_without_info_is_not_taken_for_a_dataset(tmp_path):
  (tmp_path / 'cifar10' / '3.0.2').mkdir(parents=True)
  with pytest.raises(UserError, match=r'no dataset_info\.json; delete'):
    data.load('cifar10', tmp_path)


def cut(path):
  path.write_bytes(path.read_bytes()[:-100])


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 255
  path.write_bytes(content)


def empty(path):
  path.write_bytes(b'')


@pytest.mark.parametrize(
  'damage', [cut, flip, empty, lambda path: path.unlink()]
)
@pytest.mark.parametrize('file', ['cifar10-train.*', 'dataset_info.json'])
def test_damaged_file_is_reported(
  cifar_dir, tmp_path, file, damage, no_network
):
  shutil.copytree(cifar_dir, tmp_path, dirs_exist_ok=True)
  (path,) = (tmp_path / 'cifar10' / '3.0.2').glob(file)
  damage(path)
  with pytest.raises(UserError) as caught:
    data.load('cifar10', tmp_path)
  message = str(caught.value)
  assert "Dataset 'cifar10' " in message
  assert str(tmp_path) in message
  assert 'download_and_prepare()' in message
  assert '\n' not in message
  assert len(message) < 1000
  assert '{{' not in message


@pytest.mark.parametrize(
  ('ids', 'match'),
  [
    (['train_0', 'train_0', 'train_2'], r"row 1 of the 3 of split 'train'"),
    (['train_0', 'train_1', 'train_3'], r"id b'train_3' .* below 3"),
    (['train_0', 'train_1', 'cat.png'], r"id b'cat.png' .* below 3"),
  ],
)
def test_ids_that_are_not_a_numbering_are_refused(tmp_path, ids, match):
  def example(split, i):
    return cifar(split, i) | ({'id': ids[i]} if split == 'train' else {})

  prepare(tmp_path, 'cifar10', {'train': 3, 'test': 3}, example)
  with pytest.raises(UserError, match=match):
    data.load('cifar10', tmp_path)


def test_absent_split_is_named(tmp_path):
  prepare(tmp_path, 'svhn_cropped', {'train': 3, 'test': 3}, cifar)
  with pytest.raises(UserError, match=r"no split 'extra'"):
    data.load('svhn', tmp_path)
