"""Every source gives the same rows in the same order, or says why not."""

import importlib
import shutil
import socket

import numpy as np
from PIL import Image
import pytest

from flatmatch_jax import data
from flatmatch_jax.data import sources
from flatmatch_jax.training import config as config_lib
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
  tfds = sources.import_tfds()
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


def stored(builder, split, channel=1):
  """One channel of a split's images, record after record."""
  import tensorflow as tf

  files = sorted(str(path) for path in builder.data_path.glob(f'*-{split}.*'))
  features = builder.info.features
  return [
    int(features.deserialize_example(record)['image'][0, 0, channel])
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


def test_absent_dataset_fails_soon_and_says_what_to_run(
  tmp_path, no_network, capsys
):
  folder = tmp_path / 'absent'
  with pytest.raises(UserError) as caught:
    data.load('stl10', folder)
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


# Any dataset of TFDS.


def any_tfds(name, folder, size=16):
  return data.load('tfds', folder, tfds_name=name, image_size=size)


def test_images_of_one_size_stay_as_they_are(tmp_path, no_network):
  def example(split, i):
    return {'image': image(split, i, 28)[..., 1:2], 'label': i % 10}

  builder = prepare(tmp_path, 'mnist', {'train': 30, 'test': 10}, example)
  dataset = any_tfds('mnist', tmp_path)
  assert dataset.name == 'tfds'
  assert dataset.class_names == tuple(NAMES)
  assert dataset.train_images.shape == (30, 28, 28, 1)
  assert dataset.test_images.shape == (10, 28, 28, 1)
  order = stored(builder, 'train', 0)
  assert dataset.train_images[:, 5, 7, 0].tolist() == order
  assert dataset.train_labels.tolist() == [i % 10 for i in order]
  assert not no_network


def flower(split, i):
  """Wider with each number, its middle marked by the number."""
  pixels = np.zeros((20, 40 + 2 * i, 3), np.uint8)
  pixels[:, 10 + i : 30 + i] = 20 + 20 * i
  return {'file_name': f'{i}.jpg', 'image': pixels, 'label': i % 10}


def flowers(folder, counts, example=flower):
  return prepare(folder, 'oxford_flowers102', counts, example, names=None)


def test_images_of_other_sizes_are_scaled_and_cut(tmp_path):
  counts = {'train': 11, 'validation': 5, 'test': 3}
  flowers(tmp_path, counts)
  dataset = any_tfds('oxford_flowers102', tmp_path)
  assert dataset.train_images.shape == (11, 16, 16, 3)
  assert dataset.test_images.shape == (3, 16, 16, 3)
  assert len(dataset.class_names) == 102
  # Stored as JPEG, so only nearly; the dark sides are cut off.
  numbers = np.round(dataset.train_images[:, 8, 8, 0] / 20).astype(int) - 1
  assert sorted(numbers) == list(range(11))
  assert dataset.train_labels.tolist() == [i % 10 for i in numbers]
  expected = 20 + 20 * numbers[:, None, None, None]
  inside = dataset.train_images[:, :, 2:-2].astype(int)
  assert np.abs(inside - expected).max() <= 12


@pytest.mark.parametrize(
  ('counts', 'hidden', 'expected'),
  [
    ({'train': 3, 'validation': 5}, False, 5),
    ({'train': 3, 'validation': 5, 'test': 4}, False, 4),
    ({'train': 3, 'validation': 5, 'test': 4}, True, 5),
    ({'train': 3, 'test': 4}, True, 0),
    ({'train': 3}, False, 0),
  ],
)
def test_test_split_is_test_or_validation(tmp_path, counts, hidden, expected):
  def example(split, i):
    label = -1 if hidden and split == 'test' else 0
    return flower(split, i) | {'label': label}

  flowers(tmp_path, counts, example)
  dataset = any_tfds('oxford_flowers102', tmp_path)
  assert len(dataset.train_images) == 3
  assert dataset.test_images.shape == (expected, 16, 16, 3)
  assert dataset.test_labels.tolist() == [0] * expected


def test_known_datasets_keep_their_order(cifar_dir):
  ours, same = data.load('cifar10', cifar_dir), any_tfds('cifar10', cifar_dir)
  np.testing.assert_array_equal(ours.train_images, same.train_images)
  np.testing.assert_array_equal(ours.train_labels, same.train_labels)


@pytest.mark.parametrize(
  ('name', 'match'),
  [
    ('wider_face', r"no feature 'label' \(it has: .*image.*choose"),
    ('eurosat/all', r"no feature 'image'"),
    ('nosuch', r"'nosuch' is neither in .* nor known to TFDS.*list_builders"),
    ('mnist:9.9.9', r"'mnist:9\.9\.9' is neither in .*only: 3"),
  ],
)
def test_other_datasets_are_refused_before_any_download(
  tmp_path, no_network, name, match
):
  with pytest.raises(UserError, match=match) as caught:
    any_tfds(name, tmp_path)
  assert '\n' not in str(caught.value)
  assert not no_network


@pytest.mark.parametrize(
  ('feature', 'match'),
  [
    ({'image': 'float32'}, 'grey or RGB images of 8 bits'),
    ({'image': (8, 8, 4)}, 'grey or RGB images of 8 bits'),
    ({'label': 'integer'}, 'one of several classes'),
  ],
)
def test_features_that_are_no_images_or_classes_are_refused(feature, match):
  tfds = sources.import_tfds()
  features = {
    'image': tfds.features.Image(shape=(8, 8, 3)),
    'label': tfds.features.ClassLabel(num_classes=3),
  }
  if feature.get('image') == 'float32':
    features['image'] = tfds.features.Tensor(shape=(8, 8, 3), dtype=np.float32)
  elif 'image' in feature:
    features['image'] = tfds.features.Image(shape=feature['image'])
  else:
    features['label'] = tfds.features.Scalar(dtype=np.int64)

  class Builder:
    class info:
      pass

  Builder.info.features = tfds.features.FeaturesDict(features)
  with pytest.raises(UserError, match=match):
    sources._check_features(Builder, 'odd')


@pytest.mark.parametrize('name', ['cifar10:9.9.9', 'cifar10/other'])
def test_wrong_name_is_no_reason_to_delete_data(cifar_dir, name, no_network):
  with pytest.raises(UserError, match='neither in') as caught:
    any_tfds(name, cifar_dir)
  assert 'Delete' not in str(caught.value)


def test_dataset_without_train_is_refused(tmp_path):
  prepare(
    tmp_path,
    'cifar10_1',
    {'test': 3},
    lambda split, i: {'image': image(split, i, 32), 'label': i},
  )
  with pytest.raises(UserError, match=r"no split 'train'"):
    any_tfds('cifar10_1', tmp_path)


# From a config.


def config_of(name, arg='', **fields):
  config = importlib.import_module(f'configs.{name}').get_config(arg)
  config.update(fields)
  return config


def save_npz(path, shape):
  np.savez(
    path,
    labeled_images=np.zeros((2, *shape), np.uint8),
    labeled_labels=np.arange(2),
    unlabeled_images=np.zeros((3, *shape), np.uint8),
  )


def test_every_config_loads_through_from_config(tmp_path, cifar_dir):
  digits = data.from_config(config_of('digits'))
  assert digits.train_images.shape == (1437, 8, 8, 1)
  cifar = data.from_config(config_of('cifar10', data_dir=str(cifar_dir)))
  assert len(cifar.train_images) == 40
  named = config_of('tfds', 'name=cifar10', data_dir=str(cifar_dir))
  assert data.from_config(named).train_images.shape == (40, 32, 32, 3)
  for shape in ((8, 8), (8, 8, 3)):
    save_npz(tmp_path / 'own.npz', shape)
    own = config_of('npz', data_dir=str(tmp_path / 'own.npz'))
    assert len(data.from_config(own).train_images) == 5
  for name in ('labeled/a/1.png', 'labeled/b/1.png', 'unlabeled/1.png'):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    Image.new('L', (9, 9)).save(path)
  own = config_of('folder', 'image_size=12', data_dir=str(tmp_path))
  assert data.from_config(own).train_images.shape == (3, 12, 12, 3)


def test_statistics_must_fit_the_channels(tmp_path):
  save_npz(tmp_path / 'own.npz', (8, 8))
  config = config_of('npz', data_dir=str(tmp_path / 'own.npz'))
  config.std = (0.2, 0.2, 0.2)
  with pytest.raises(
    UserError, match=r'config\.std has 3 numbers.* 1 channels'
  ):
    data.from_config(config)


@pytest.mark.parametrize('name', ['folder', 'npz', 'tfds'])
def test_configs_of_own_data_pass_the_checks(name):
  config = config_of(name, 'method=fixmatch,labels=40', data_dir='somewhere')
  config.update({'tfds_name': 'mnist'} if name == 'tfds' else {})
  config_lib.check(config)
  assert config.labels == 40
  assert config_of(name, 'labels=all').labels == 'all'


def test_network_and_shift_go_with_the_size():
  small = config_of('folder', 'fast=false')
  large = config_of('folder', 'fast=false,image_size=96')
  assert (small.model, small.pad, small.image_size) == ('wrn_28_2', 4, 32)
  assert (large.model, large.pad, large.image_size) == ('wrn_37_2', 12, 96)
  assert small.labels == 'all'
  assert len(small.mean) == len(small.std) == 3


@pytest.mark.parametrize(
  ('config', 'match'),
  [
    (('folder', ''), r'data_dir is empty.*--config\.data_dir=PATH'),
    (('npz', ''), r'data_dir is empty.*--config\.data_dir=PATH'),
    (('tfds', ''), r'No dataset of TFDS is named.*:name='),
    (('folder', 'image_size=4', 'd'), r'image_size=4 must lie from 8'),
    (('folder', 'image_size=4096', 'd'), r'image_size=4096 must lie from 8'),
    (('folder', 'labels=0', 'd'), r'labels=0 .* number of classes of folder'),
    (('folder', 'labels=-3', 'd'), r'labels=-3 must be a positive multiple'),
  ],
)
def test_wrong_configs_of_own_data_are_refused(config, match):
  name, arg, *folder = config
  with pytest.raises(UserError, match=match) as caught:
    config_lib.check(config_of(name, arg, data_dir=''.join(folder)))
  assert 'The paper' not in str(caught.value)


def test_size_is_chosen_with_the_file():
  config = config_of('folder', data_dir='somewhere')
  config.image_size = 64
  with pytest.raises(UserError, match=r'FILE\.py:image_size=64'):
    config_lib.check(config)


def test_unreadable_number_of_labels_is_named():
  with pytest.raises(UserError, match=r'labels=few .* not a whole number'):
    config_of('folder', 'labels=few')
