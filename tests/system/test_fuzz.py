"""Readers of files that anyone may have written, fed with damaged ones.

Each gives a value of the right kind or the error it documents, never another
one, and takes no more memory than its limits allow. The same examples every
time: a failure is a fact, not luck.
"""

import importlib
import io
import json
import resource

from fuzzing import JSON, damaged, fuzz
import hypothesis
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest

from flatmatch_jax.data import arrays, cache, images, splits
from flatmatch_jax.run import checkpoint
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import array_files
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import load
from flatmatch_jax.types import UserError

SHAPE = (8, 8, 3)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Where files go; what they cost in memory is measured at the end."""
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  yield tmp_path_factory.mktemp('fuzz')
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert (after - before) * 1024 < 2**30


# Images.


def encoded(kind, mode='RGB', **options):
  noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
  buffer = io.BytesIO()
  Image.fromarray(noise).convert(mode).save(buffer, kind, **options)
  return buffer.getvalue()


def with_exif(kind):
  exif = Image.Exif()
  exif[0x0112] = 6
  return encoded(kind, exif=exif.tobytes())


FRAMES = [Image.new('RGB', (16, 16), (20 * i, 0, 0)) for i in range(3)]
KINDS = {
  'png': [encoded('PNG'), encoded('PNG', 'P'), encoded('PNG', 'LA')],
  'jpeg': [with_exif('JPEG'), encoded('JPEG', 'CMYK', progressive=True)],
  'gif': [encoded('GIF'), encoded('GIF', save_all=True, append_images=FRAMES)],
  'tiff': [encoded('TIFF'), encoded('TIFF', compression='tiff_lzw')],
  'webp': [encoded('WEBP'), with_exif('WEBP')],
  'bmp': [encoded('BMP'), encoded('BMP', 'P')],
}


@pytest.mark.filterwarnings('ignore::UserWarning:PIL')
@pytest.mark.filterwarnings('ignore::PIL.Image.DecompressionBombWarning')
@pytest.mark.parametrize('kind', KINDS)
def test_images(kind, folder):
  path = folder / f'image.{kind}'

  @fuzz(200)
  @hypothesis.given(damaged(KINDS[kind]))
  def check(content):
    path.write_bytes(content)
    try:
      pixels = images.read(path, SHAPE)
    except ValueError as error:
      assert 0 < len(str(error)) <= 200
      assert '\n' not in str(error)
    else:
      assert (pixels.shape, pixels.dtype) == (SHAPE, np.uint8)

  check()


# Arrays.


def npz(save=np.savez, **content):
  buffer = io.BytesIO()
  save(buffer, **content)
  return buffer.getvalue()


GOOD = {
  'labeled_images': np.zeros((4, 8, 8, 3), np.uint8),
  'labeled_labels': np.array([0, 1, 0, 1]),
  'unlabeled_images': np.ones((3, 8, 8, 3), np.uint8),
  'class_names': np.array(['cat', 'dog']),
}


def check_arrays(path, content):
  path.write_bytes(content)
  try:
    dataset = arrays.load(path)
  except UserError as error:
    assert str(path) in str(error)
    return
  assert dataset.train_images.dtype == np.uint8
  assert dataset.train_images.ndim == 4
  assert len(dataset.train_images) == len(dataset.train_labels)
  assert dataset.train_labels.max() < len(dataset.class_names)


def test_npz_of_images(folder):
  originals = [npz(**GOOD), npz(np.savez_compressed, **GOOD)]

  @fuzz(300)
  @hypothesis.given(damaged(originals))
  def check(content):
    check_arrays(folder / 'data.npz', content)

  check()


def test_arrays_of_other_kinds(folder):
  values = st.builds(
    lambda shape, kind: np.zeros(shape, kind),
    st.lists(st.integers(0, 4), max_size=5),
    st.sampled_from(('u1', 'i8', 'f4', '?', 'U3', 'S2', 'c8', 'M8[s]', 'V2')),
  )

  @fuzz(100)
  @hypothesis.given(st.sampled_from([*GOOD]), values)
  def check(name, value):
    check_arrays(folder / 'data.npz', npz(**(GOOD | {name: value})))

  check()


# Weights.

WEIGHTS = {
  'a/kernel': np.ones((2, 3), np.float32),
  'a/bias': np.ones(3, np.float16),
}


def safetensors(header, size=36):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return len(text).to_bytes(8, 'little') + text + bytes(size)


HEADER = {
  'a': {'dtype': 'F32', 'shape': [2, 3], 'data_offsets': [0, 24]},
  'b': {'dtype': 'BF16', 'shape': [6], 'data_offsets': [24, 36]},
}


def check_weights(path, content):
  path.write_bytes(content)
  try:
    with array_files.open_arrays(str(path)) as found:
      for stored in found.values():
        if np.prod(stored.shape, dtype=float) < 1e6:  # As a network's are.
          values = stored.read()
          assert (values.shape, values.dtype) == (stored.shape, np.float32)
  except UserError as error:
    assert str(path) in str(error)


def test_weights(folder):
  originals = [
    npz(**WEIGHTS),
    npz(np.savez_compressed, **WEIGHTS),
    safetensors(HEADER),
  ]

  @fuzz(400)
  @hypothesis.given(damaged(originals))
  def check(content):
    check_weights(folder / 'weights', content)

  check()


def test_headers_of_safetensors(folder):
  entry = st.dictionaries(
    st.sampled_from(('dtype', 'shape', 'data_offsets')),
    JSON | st.sampled_from(('F32', [2, 3], [0, 24])),
  )

  @fuzz(200)
  @hypothesis.given(st.dictionaries(st.text(max_size=3), entry) | JSON)
  def check(header):
    check_weights(folder / 'weights', safetensors(header))

  check()


# Text.


def test_labels(folder):
  path = folder / 'labels.json'
  labels = np.arange(40) % 4
  good = json.dumps({'labeled': list(range(8))}).encode()

  @fuzz(300)
  @hypothesis.given(
    damaged([good, good[12:-1], b'0\n1\n2\n3\n'])
    | JSON.map(lambda value: json.dumps(value).encode())
  )
  def check(content):
    path.write_bytes(content)
    try:
      found = splits.read(path, labels, 4)
    except UserError as error:
      assert str(path) in str(error)
    else:
      assert len(set(labels[found])) == 4

  check()


def test_workdirs(folder):
  """Of others, to evaluate or predict by; a network is not made yet."""
  workdir = Workdir(folder / 'run')
  config = importlib.import_module('configs.digits').get_config()
  config_lib.check_fields(config)
  dataset = {
    'class_names': ['a', 'b'],
    'image_shape': [8, 8, 1],
    'num_train': 9,
    'num_unlabeled': 9,
    'test_share': 1.0,
  }
  workdir.write('config.json', json.loads(config.to_json_best_effort()))
  text = (workdir.path / 'config.json').read_bytes()
  keys = [*config] + [f'method_args.{key}' for key in config.method_args]

  @fuzz(200)
  @hypothesis.given(
    st.sampled_from(keys), JSON, st.sampled_from([*dataset]), JSON
  )
  def check_values(key, value, name, other):
    tree = json.loads(text)
    part, _, rest = key.partition('.')
    (tree[part] if rest else tree)[rest or part] = value
    check_run(tree, dataset | {name: other})

  def check_run(tree, described):
    workdir.write('config.json', tree)
    workdir.write('dataset.json', described)
    with pytest.raises(UserError) as caught:
      load.load_run(workdir)
    assert '\n' not in str(caught.value)

  @fuzz(100)
  @hypothesis.given(damaged([text, text.replace(b'\n', b'')]))
  def check_bytes(content):
    (workdir.path / 'config.json').write_bytes(content)
    with pytest.raises(UserError):
      load.load_run(workdir)

  check_values()
  check_bytes()


def test_metrics(folder):
  workdir = Workdir(folder / 'run')
  workdir.path.mkdir(exist_ok=True)
  path = workdir.path / 'metrics.jsonl'
  good = b'{"step": 1, "error": 2.5}\n{"step": 2, "error": null}\n'

  @fuzz(200)
  @hypothesis.given(
    damaged([good]) | JSON.map(lambda x: good + json.dumps(x).encode())
  )
  def check(content):
    path.write_bytes(content)
    try:
      rows = workdir.metrics()
      assert all(isinstance(row['step'], int) for row in rows)
      workdir.cut_metrics(1)
    except UserError as error:
      assert str(path) in str(error)

  check()


def test_notes_of_checkpoints(folder):
  (folder / 'checkpoints').mkdir()
  checkpoints = Checkpoints(folder / 'checkpoints', read_only=True)
  content: dict = {'seconds': 1.5, 'class_names': ['a'], 'error': 2.5}
  content['checksums'] = {'step': 7}
  content['crc32'] = checkpoint._crc32(content)
  notes, metrics = (
    folder / 'checkpoints' / '1' / kind / name
    for kind, name in (('notes', 'metadata'), ('metrics', 'metrics'))
  )
  originals = json.dumps(content).encode(), b'{"error": 2.5}'
  for path in (notes, metrics):
    path.parent.mkdir(parents=True)
  as_bytes = JSON.map(lambda value: json.dumps(value).encode())

  def check(*contents):
    notes.write_bytes(contents[0])
    metrics.write_bytes(contents[1])
    try:
      found = checkpoints._notes(1)
    except checkpoint.DamagedError:
      return
    assert found == {k: v for k, v in content.items() if k != 'crc32'}

  @fuzz(150)
  @hypothesis.given(damaged(originals[:1]) | as_bytes)
  def check_notes(damaged):
    check(damaged, originals[1])

  @fuzz(150)
  @hypothesis.given(damaged(originals[1:]) | as_bytes)
  def check_metrics(damaged):
    check(originals[0], damaged)

  check_notes()
  check_metrics()


def test_cache_of_images(folder):
  pixels = np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, *SHAPE)
  keys, why = ['a' * 32, 'b' * 32, 'c' * 32], ['', 'torn', '']
  cache.store(folder, '8x8x3', keys, pixels, why)
  (file,) = folder.glob('8x8x3-*')
  original = file.read_bytes()

  @fuzz(300)
  @hypothesis.given(damaged([original]))
  def check(content):
    file.write_bytes(content)
    found = cache.load(file)
    if found is not None:
      np.testing.assert_array_equal(found[1], pixels)
      assert (found[0], found[2]) == (keys, why)

  check()
