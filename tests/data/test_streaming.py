"""Streams are pure functions of (seed, step), whoever reads them from where."""

import io
import itertools
import time
import types

import jax
import numpy as np
from PIL import Image
import pytest
import runs
from tiny_imagenet import encode, picture, prepare
from trees import assert_equal

from configs import imagenet, imagenet30
from flatmatch_jax.data import (
  crops,
  frames,
  on_host,
  pictures,
  records,
  splits,
  streaming,
)
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.report import predictions
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import sharding
from flatmatch_jax.training import classify, load, loop
from flatmatch_jax.types import Batch, UserError

SIZE = 16
VIEWS = ('weak', 'strong')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('imagenet')
  prepare(folder)
  return folder


@pytest.fixture(scope='module')
def dataset(folder):
  return streaming.from_tfds('imagenet2012', folder, SIZE)


def place(dataset, labeled, includes=True):
  pool = np.arange(len(dataset.train_labels))
  if not includes:
    pool = np.setdiff1d(pool, labeled)
  return streaming.place(dataset, splits.Split(labeled, pool, labeled[:0]))


@pytest.fixture(scope='module')
def data(dataset):
  return place(dataset, np.array([1, 5, 9, 20]))


def batches(data, start=0, stop=3, seed=0, views=VIEWS, **kwargs):
  return list(streaming.batches(data, seed, start, stop, 4, 6, views, **kwargs))


@pytest.fixture(scope='module')
def whole(data):
  return batches(data, stop=5)


def test_dataset_has_the_labels_and_names_of_its_files(dataset):
  assert dataset.train_images.shape == (30, SIZE, SIZE, 3)
  assert (len(dataset.train_images), len(dataset.test_images)) == (30, 7)
  assert dataset.train_images.dtype == np.uint8
  assert len(dataset.class_names) == 1000
  found = {dataset.train_images.records.read(i) for i in range(30)}
  assert found == {picture('train', i) for i in range(30)}


def test_batches_have_the_shapes_of_the_network(data, whole):
  image = lambda n: ((n, SIZE, SIZE, 3), np.uint8)
  number = lambda n: ((n,), np.int32)
  for batch in whole:
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.type), batch._asdict())
    assert shapes == {
      'labeled': {'weak': image(4), 'label': number(4), 'index': number(4)},
      'unlabeled': {
        'weak': image(6),
        'strong': image(6),
        'index': number(6),
        'truth': number(6),
      },
      'fixed': None,
    }
    index = batch.unlabeled['index']
    np.testing.assert_array_equal(batch.unlabeled['truth'], data.labels[index])
    assert set(batch.labeled['label']) <= set(data.labels[data.labeled])


def test_equal_seed_and_step_give_equal_batches(data, whole):
  assert_equal(batches(data, stop=5), whole)
  other = batches(data, seed=1)
  for a, b in itertools.product(other, whole):
    assert (a.unlabeled['index'] != b.unlabeled['index']).any()
  for a, b in itertools.combinations(whole, 2):
    assert (a.unlabeled['index'] != b.unlabeled['index']).any()


def test_resuming_gives_the_tail(data, whole):
  assert_equal(batches(data, start=3, stop=5), whole[3:])


def test_two_shards_are_the_whole(data, whole):
  halves = [
    batches(data, stop=5, rows=lambda size: range(size // 2)),
    batches(data, stop=5, rows=lambda size: range(size // 2, size)),
  ]
  for left, right, batch in zip(*halves, whole, strict=True):
    joined = jax.tree.map(lambda *x: np.concatenate(x), left, right)
    assert_equal(joined, batch)


def nearest(colours, image):
  """The training image whose mean colour is that of `image`."""
  return np.abs(colours - image.mean((0, 1))).sum(-1).argmin()


@pytest.fixture(scope='module')
def colours(dataset):
  return dataset.train_images[:].mean((1, 2))


def test_views_are_other_crops_of_the_same_image(colours, whole):
  batch = whole[0].unlabeled
  assert (batch['weak'] != batch['strong']).any((1, 2, 3)).all()
  for image, index in zip(batch['weak'], batch['index'], strict=True):
    assert nearest(colours, image) == index


def test_repeated_view_is_drawn_anew(data):
  (batch,) = batches(data, stop=1, views=('weak', 'weak2'))
  assert (batch.unlabeled['weak'] != batch.unlabeled['weak2']).any()


def test_strong_views_are_augmented_on_the_host(data, whole):
  (plain,) = batches(data, stop=1, operations=0)  # The crops alone.
  np.testing.assert_array_equal(
    plain.unlabeled['weak'], whole[0].unlabeled['weak']
  )
  part = streaming._parts(data, 4, 6, VIEWS)[1]
  for row, crop in enumerate(plain.unlabeled['strong']):
    draws = on_host.draw(streaming._draw(part, 3, 0, 0, row).raw[1])
    expected = on_host.strong(crop, draws)
    np.testing.assert_array_equal(whole[0].unlabeled['strong'][row], expected)


def test_method_without_views_reads_no_unlabeled_images(data):
  (batch,) = batches(data, stop=1, views=())
  assert set(batch.unlabeled) == {'index', 'truth'}


def test_every_image_is_drawn_equally_often(data):
  part = streaming._parts(data, 4, 6, VIEWS)[1]
  drawn = [
    streaming._draw(part, 3, 0, step, row).choice
    for step in range(500)
    for row in range(6)
  ]
  counts = np.bincount(drawn, minlength=30)
  assert np.abs(counts - 100).max() < 45  # 4.5 standard deviations.


def test_labeled_images_can_be_taken_out_of_the_pool(dataset):
  labeled = np.arange(0, 30, 2)
  data = place(dataset, labeled, includes=False)
  drawn = [batch.unlabeled['index'] for batch in batches(data, views=())]
  assert set(np.concatenate(drawn)) <= set(range(1, 30, 2))


def test_labeled_views_are_of_the_labeled_images(colours, data, whole):
  views = (*VIEWS, 'labeled_strong')
  (batch,) = batches(data, stop=1, views=views)
  assert_equal(batch.unlabeled, whole[0].unlabeled)
  assert set(batch.labeled) == {'weak', 'strong', 'label', 'index'}
  place = batch.labeled['index']
  index = np.array([1, 5, 9, 20])[place]
  assert [nearest(colours, x) for x in batch.labeled['weak']] == list(index)
  np.testing.assert_array_equal(batch.labeled['label'], data.labels[index])


def test_fixed_labels_come_with_their_images(colours, data, whole):
  fixed = data.with_fixed([3, 4], [8, 9])
  np.testing.assert_array_equal(fixed.fixed, [1, 5, 9, 20, 3, 4])
  known = list(data.labels[[1, 5, 9, 20]])
  assert fixed.fixed_labels.tolist() == [*known, 8, 9]
  got = batches(fixed, stop=2)
  assert_equal([b._replace(fixed=None) for b in got], whole[:2])
  label_of = dict(zip(fixed.fixed, fixed.fixed_labels, strict=True))
  for batch in got:
    for image, label in zip(
      batch.fixed['weak'], batch.fixed['label'], strict=True
    ):
      assert label_of[nearest(colours, image)] == label


def test_numbers_of_philox_stay_what_they_are(data):
  part = streaming._parts(data, 4, 6, VIEWS)[1]
  index, uniform, raw = streaming._draw(part, 3, 7, 11, 2)
  assert uniform.shape == (2, 10, 4)
  assert 0 <= uniform.min() < uniform.max() < 1
  assert index == 12
  assert uniform[0, 0].round(6).tolist() == [
    0.230717,
    0.613647,
    0.391555,
    0.452553,
  ]
  drawn = [1, 11, 9], [0, -126, 113], (777, 131), 461
  assert on_host.draw(raw[1]) == drawn


def test_boxes_lie_within_the_image_and_keep_their_rules():
  rng = np.random.RandomState(0)
  areas, ratios = [], []
  for height, width in [(60, 40), (40, 60), (375, 500), (1, 1), (7, 300)]:
    for _ in range(40):
      uniform = rng.uniform(size=(10, 4))
      for name in VIEWS:
        y, x, h, w = crops.random_box(name, uniform, height, width)
        assert 0 <= y <= y + h <= height
        assert 0 <= x <= x + w <= width
        assert min(h, w) >= 1
        if name == 'weak':
          assert h == w == max(1, round(min(height, width) * 0.875))
        elif min(height, width) > 100:
          areas.append(h * w / height / width)
          ratios.append(w / h)
  assert 0.079 < min(areas) < 0.3
  assert 0.65 < max(areas) <= 1
  assert 0.74 < min(ratios) < 0.85
  assert 1.2 < max(ratios) < 1.35


def test_image_that_no_ratio_fits_is_cut_at_its_centre():
  uniform = np.full((10, 4), 0.999999)  # All of the area, at 4 : 3.
  # 3 : 4, the nearest that is allowed.
  assert crops.strong_box(uniform, 300, 30) == (130, 0, 40, 30)
  assert crops.strong_box(uniform, 30, 300) == (0, 130, 30, 40)


def test_extreme_numbers_stay_inside():
  for number in (0.0, np.nextafter(1, 0)):
    uniform = np.full((10, 4), number)
    y, x, h, w = crops.weak_box(uniform, 9, 8)
    assert (h, w) == (7, 7)
    assert (y, x) == ((0, 0) if number == 0 else (2, 1))


@pytest.mark.parametrize('size', [(16, 16), (60, 40), (20, 40), (9, 5)])
def test_a_box_is_scaled_without_aliases(size):
  """Down by means of areas, up between neighbours: nearly as Pillow does."""
  rng = np.random.RandomState(0)
  coarse = rng.randint(0, 256, (5, 5, 3)).astype(np.uint8)
  image = Image.fromarray(coarse).resize((90, 90), Image.BICUBIC)
  height, width = size
  got = crops.cut(np.asarray(image), (7, 3, height, width), SIZE)
  box = (3, 7, 3 + width, 7 + height)
  wanted = image.resize((SIZE, SIZE), Image.BILINEAR, box)
  assert np.abs(got.astype(int) - np.asarray(wanted)).mean() < 2
  noise = rng.randint(0, 256, (96, 24, 3)).astype(np.uint8)
  assert crops.cut(noise, (0, 0, 96, 24), 12).std() < noise.std() / 3


def test_every_kind_of_image_is_decoded_as_pillow_does():
  image = Image.open(io.BytesIO(picture('train', 0)))
  wanted = np.asarray(image).astype(int)
  grey = np.asarray(image.convert('L').convert('RGB')).astype(int)
  exif = Image.Exif()
  exif[0x0112] = 6  # To be turned by a quarter, which is not done.
  for kind, data in {
    'JPEG': encode(image, quality=95),
    'progressive': encode(image, quality=95, progressive=True),
    'CMYK': encode(image.convert('CMYK'), quality=95),
    'turned': encode(image, quality=95, exif=exif),
    'stray bytes': encode(image, quality=95).replace(
      b'\xff\xd9', b'123\xff\xd9'
    ),
    'PNG': encode(image, 'PNG'),
    'with alpha': encode(image.convert('RGBA'), 'PNG'),
    'BMP': encode(image, 'BMP'),
  }.items():
    got = crops.decode(data)
    assert (got.dtype, got.shape) == (np.uint8, wanted.shape), kind
    assert np.abs(got - wanted).mean() < 2, kind
  assert np.abs(crops.decode(encode(image.convert('L'))) - grey).mean() < 2


def test_frames_follow_the_rule_of_the_test(dataset, monkeypatch):
  """Pillow with the shorter side at 8/7 of the size, and the centre."""
  coarse = np.random.RandomState(0).randint(0, 256, (6, 8, 3))
  image = Image.fromarray(coarse.astype(np.uint8)).resize((400, 320))
  read = lambda: encode(image, 'PNG')
  monkeypatch.setattr(records.Records, 'start', lambda *_: [read])
  (got,) = frames.Frames(dataset.train_images.records, 64)[:1]
  side = 280
  box = (60, 20, 60 + side, 20 + side)
  wanted = image.resize((64, 64), Image.BILINEAR, box)
  assert np.abs(got.astype(int) - np.asarray(wanted)).mean() < 0.6


def test_frames_give_every_image_once_in_any_slices(dataset):
  images = dataset.train_images
  whole = images[:]
  assert whole.shape == (30, SIZE, SIZE, 3)
  assert whole.dtype == np.uint8
  assert len({image.tobytes() for image in whole}) == 30
  for size in (7, 30, 100):
    for _ in range(2):  # A second pass starts again.
      parts = [images[at : at + size] for at in range(0, 30, size)]
      np.testing.assert_array_equal(np.concatenate(parts), whole)
  np.testing.assert_array_equal(images[9:12], whole[9:12])
  np.testing.assert_array_equal(images[12:20], whole[12:20])
  np.testing.assert_array_equal(images[-3:], whole[-3:])
  assert images[30:40].shape == (0, SIZE, SIZE, 3)
  with pytest.raises(TypeError, match='without a stride'):
    images[::2]
  with pytest.raises(TypeError, match='slices'):
    images[3]


def test_frames_read_ahead(dataset, monkeypatch):
  read = []
  images = frames.Frames(dataset.train_images.records, SIZE)
  inner = records.Records.start
  monkeypatch.setattr(
    records.Records,
    'start',
    lambda self, rows: read.extend(rows) or inner(self, rows),
  )
  images[:5]
  until = time.monotonic() + 5
  while max(read) < 9 and time.monotonic() < until:
    time.sleep(0.01)
  assert max(read) >= 9


def test_classifier_counts_each_frame_once(dataset):
  """Seven images in batches of four: the last one is partial."""

  class Mean:
    def apply(self, variables, images, train):
      logits = images.mean((1, 2)) * variables['params']
      return type('Prediction', (), {'logits': logits})

  mesh = sharding.make_mesh()
  run = classify.make_classifier(Mean(), (0.0,) * 3, (1.0,) * 3, 4, mesh)
  weights = (1.0, 5.0)
  found = run(weights, {}, dataset.test_images)
  mean = dataset.test_images[:].mean((1, 2)) / 255
  for got, params in zip(found, weights, strict=True):
    assert got.shape == (7, 3)
    np.testing.assert_allclose(got, jax.nn.softmax(params * mean), atol=1e-5)


def test_report_shows_streamed_images(dataset, monkeypatch):
  """Those of the test set that the predictions are about."""
  probs = np.random.default_rng(0).dirichlet(
    np.ones(len(dataset.class_names)), len(dataset.test_labels)
  )
  run = load.Run(
    config=types.SimpleNamespace(pad=0, flip=True, strong_operations=3),
    dataset={},
    state=types.SimpleNamespace(ema_params=0, batch_stats=0, step=7),
    classify=lambda weights, batch_stats, images: [probs],
    program=None,
  )
  # Its augmentations take long to compile.
  monkeypatch.setattr(
    pictures, 'pairs', lambda images, *args: {'image': images}
  )
  held_out = dataset.test_images, dataset.test_labels, 'test'
  found = predictions.predict(run, dataset, held_out)
  assert found.cropped
  every = dataset.test_images[:]
  for images, rows in found.examples.values():
    np.testing.assert_array_equal(images, every[rows])
  assert found.views['image'].shape == (6, SIZE, SIZE, 3)


def test_undecodable_image_is_named(tmp_path):
  bad = encode_bad()

  def image(split, i):
    return bad if (split, i) == ('train', 4) else picture(split, i)

  prepare(tmp_path, {'train': 6, 'validation': 3}, image)
  dataset = streaming.from_tfds('imagenet2012', tmp_path, SIZE)
  images = dataset.train_images
  (at,) = [i for i in range(6) if images.records.read(i) == bad]
  match = rf'Image {at} \(byte \d+ of .*train.*\) cannot be decoded'
  with pytest.raises(UserError, match=match):
    images[:6]
  data = place(dataset, np.array([at]))
  with pytest.raises(UserError, match=match):
    batches(data)
  assert images[:at].shape[0] == at  # It goes on where it can.


def encode_bad():
  return picture('train', 0)[:200]


def test_thirty_classes_become_a_dataset(folder, dataset):
  names = dataset.class_names
  chosen = streaming.from_tfds(
    'imagenet2012', folder, SIZE, {'one': names[8], 'two': names[3]}
  )
  assert chosen.class_names == ('one', 'two')
  assert sorted(chosen.train_labels) == [0] * 3 + [1] * 3
  data = place(chosen, np.array([0]))
  assert max(batches(data)[0].unlabeled['index']) < 6


def test_the_thirty_classes_are_classes_of_imagenet(dataset):
  classes = imagenet30.get_config().classes
  assert list(classes) == sorted(classes) == list(imagenet30.CLASSES)
  assert len(set(classes.values())) == 30
  assert set(classes.values()) <= set(dataset.class_names)
  # The number of a class in ImageNet is its place in sorted order.
  assert dataset.class_names.index(classes['acorn']) == 988
  assert dataset.class_names.index(classes['volcano']) == 980


@pytest.fixture(scope='module')
def sampled(whole):
  """One batch by the sampler on all devices and on one."""
  mesh = sharding.make_mesh()
  assert mesh.size == 8
  raw = jax.tree.map(lambda x: np.concatenate([x, x])[:8], whole[0])
  sample = streaming.make_sampler(VIEWS, True, (0.0,) * 3, (1.0,) * 3)
  over = sharding.over_batch(mesh)
  with Prefetch((x for x in [raw]), over) as placed:
    device_raw = next(placed)
  assert device_raw.labeled['weak'].sharding == over
  constrained = streaming.make_sampler(
    VIEWS, True, (0.0,) * 3, (1.0,) * 3, over
  )
  key = jax.random.key(3)
  return raw, jax.jit(sample)(raw, key), jax.jit(constrained)(device_raw, key)


def test_sampler_flips(sampled):
  raw, batch, _ = sampled
  flips = set()
  for before, after in (
    (raw.labeled['weak'], batch.labeled['weak']),
    (raw.unlabeled['strong'], batch.unlabeled['strong']),
  ):
    for image, got in zip(before / 255, np.asarray(after), strict=True):
      straight = np.allclose(image, got, atol=1e-6)
      assert straight or np.allclose(image[:, ::-1], got, atol=1e-6)
      flips.add(straight)
  assert flips == {True, False}
  for name in ('index', 'truth'):
    np.testing.assert_array_equal(batch.unlabeled[name], raw.unlabeled[name])
  np.testing.assert_array_equal(batch.labeled['label'], raw.labeled['label'])
  assert batch.fixed is None


def test_sampler_gives_the_same_on_one_and_eight_devices(sampled):
  _, one, eight = sampled
  assert eight.unlabeled['strong'].sharding.num_devices == 8
  assert_equal(jax.tree.map(np.asarray, one), jax.tree.map(np.asarray, eight))


def numbers(stop):
  for i in range(stop):
    yield Batch({'weak': np.full((8, 2), i, np.uint8)}, {})


def over():
  return sharding.over_batch(sharding.make_mesh())


def test_prefetch_keeps_the_order_and_ends():
  with Prefetch(numbers(9), over()) as source:
    got = [int(batch.labeled['weak'][0, 0]) for batch in source]
    assert got == list(range(9))
    assert next(source, None) is None
  assert source.waited > 0


def test_prefetch_is_at_most_two_ahead():
  made = []

  def count():
    for batch in numbers(9):
      made.append(1)
      yield batch

  with Prefetch(count(), over()) as source:
    next(source)
    time.sleep(0.3)
    assert len(made) <= 3


def test_prefetch_raises_the_error_of_its_source():
  def failing():
    yield from numbers(2)
    raise UserError('no more')

  source = Prefetch(failing(), over())
  assert len([next(source), next(source)]) == 2
  with pytest.raises(UserError, match='no more'):
    next(source)
  assert next(source, None) is None
  assert not source._thread.is_alive()


def test_prefetch_ends_its_thread_when_left():
  opened = []

  def leave():
    with Prefetch(numbers(10**6), over()) as source:
      opened.append(source)
      next(source)
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    leave()
  assert not opened[0]._thread.is_alive()


def test_process_ends_while_a_stream_is_open(folder):
  """An interrupted run must not hang in threads that decode."""
  code = f"""
import sys
import jax, numpy as np
from flatmatch_jax.system import sharding
from flatmatch_jax.data import splits, streaming
from flatmatch_jax.data.prefetch import Prefetch
print({{'tensorflow', 'tensorflow_datasets'}} & set(sys.modules))
dataset = streaming.from_tfds('imagenet2012', {str(folder)!r}, 16)
split = splits.Split(np.arange(4), np.arange(len(dataset.train_labels)), None)
data = streaming.place(dataset, split)
source = streaming.batches(data, 0, 0, 10**6, 8, 8, ('weak',))
mesh = sharding.make_mesh()
batches = Prefetch(source, sharding.over_batch(mesh))
dataset.test_images[:2]
print(next(batches).labeled['weak'].shape)
raise SystemExit(3)
"""
  result = runs.python('-c', code)
  imported, shape = result.stdout.splitlines()
  assert imported == 'set()'  # Until a dataset is opened.
  assert shape == '(8, 16, 16, 3)'
  assert result.returncode == 3, result.stderr


@pytest.mark.usefixtures('tiny_network')
def test_run_trains_and_resumes_exactly(folder, tmp_path, stopped_after):
  # Without strong views, which take longest to compile.
  config = imagenet.get_config(
    'method=pseudo_label+flatmatch_fix,labels=all,model=wrn_10_1'
  )
  config.data_dir, config.image_size = str(folder), SIZE
  config.batch_size = config.unlabeled_batch_size = 8
  config.steps, config.num_val = 6, 5
  config.log_every = config.checkpoint_every = 2
  config.eval_every = 3
  # Five images are held out, and the 25 labels left are fewer than 26.
  config.recipe_args.update(pretrain_steps=3, num_fixed=26)
  whole = loop.train_and_evaluate(config, str(tmp_path / 'whole'))
  result = Workdir(tmp_path / 'whole').read('result.json')
  assert 0 < result['error_last'] <= 100
  assert 0 < result['val_error_last'] <= 100
  stopped_after(5, loop.train_and_evaluate, config, str(tmp_path / 'parts'))
  parts = loop.train_and_evaluate(config, str(tmp_path / 'parts'))
  raw = lambda state: state.replace(rng=jax.random.key_data(state.rng))
  assert_equal(jax.device_get(raw(whole)), jax.device_get(raw(parts)))
  logs = ((tmp_path / name / 'metrics.jsonl') for name in ('whole', 'parts'))
  assert len({log.read_bytes() for log in logs}) == 1
  best = load.load_run(Workdir(tmp_path / 'whole'), 'best')
  assert best.dataset['num_test'] == 7
