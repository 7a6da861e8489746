"""Models in files: what is written is the run, or nothing is written."""

import importlib
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from PIL import Image
import pytest
from refusals import check_line
import runs
import safetensors
import safetensors.numpy

import flatmatch_jax
from flatmatch_jax import data, models, predict
from flatmatch_jax.export import __main__ as export
from flatmatch_jax.export import formats
from flatmatch_jax.models import fast, resnet, vit
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import exported, load, setup
from flatmatch_jax.types import Head, UserError

# Of folders: of formulas, paths, pages and scripts.
ODD = ('=1+1', '../a', '</script><b>', 'é\u2028"\\', *'456789')


def random_variables(model, shape):
  """Weights of the usual size, and statistics that are no identity."""
  image = jnp.zeros((1, *shape))
  shapes = jax.eval_shape(
    lambda rng: model.init(rng, image, train=True), jax.random.key(0)
  )
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    values = rng.normal(size=leaf.shape).astype(np.float32)
    if "['classifier']" in name or "['other']" in name:
      return values / leaf.shape[0]  # So that no class is certain.
    if 'kernel' in name:
      return values * np.float32(np.sqrt(2 / np.prod(leaf.shape[:-1])))
    if 'var' in name or 'scale' in name:
      return 1 + np.float32(0.1) * np.abs(values)
    return np.float32(0.1) * values

  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_run(folder, names=None, steps=400, **changes):
  """The folder of a run with random weights, as after its last step."""
  config = importlib.import_module('configs.digits').get_config()
  config.update({'model': 'fast_8_16', **changes})
  dataset = data.load('digits')
  dataset = dataset._replace(class_names=names or dataset.class_names)
  run = Workdir(folder)
  split = setup.choose_split(config, dataset)
  setup.write_description(run, config, dataset, split)
  described = run.read('dataset.json')
  model, _ = load.network(config, described)
  variables = random_variables(model, described['image_shape'])
  run.append_metrics({'step': steps, 'error': 12.5})
  state = {
    'step': jnp.int32(steps),
    'ema_params': jax.tree.map(jnp.asarray, variables['params']),
    'batch_stats': jax.tree.map(jnp.asarray, variables['batch_stats']),
  }
  checkpoints = Checkpoints(run.checkpoints)
  notes = {'seconds': 0.0, 'class_names': list(dataset.class_names)}
  checkpoints.save(steps, state, notes, 12.5)
  checkpoints.close()
  return run.path


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp('runs') / 'run', ODD)


@pytest.fixture(scope='module')
def images():
  return data.load('digits').test_images[:20]


@pytest.fixture(scope='module')
def expected(workdir, images):
  return flatmatch_jax.load(workdir).probabilities(images)


@pytest.fixture(scope='module')
def files(workdir, tmp_path_factory):
  """The run in each format, written once."""
  folder = tmp_path_factory.mktemp('files')
  trained = load.load_trained(Workdir(workdir))
  pixels = data.load('digits').test_images[:8]
  for suffix in exported.SUFFIXES:
    content, about = export.make(
      Workdir(workdir), trained, suffix, pixels, 'images'
    )
    (folder / f'model{suffix}').write_bytes(content)
    text = json.dumps(about)
    (folder / f'model{suffix}.json').write_text(text)
  return folder


@pytest.fixture
def call(call, monkeypatch):
  """Runs a command on the digits, whose classes have odd names."""
  digits = data.load('digits')._replace(class_names=ODD)
  monkeypatch.setattr(load.data, 'from_config', lambda config: digits)
  return lambda *args, module=export: call(module, *args)


# Small, with every operation of their families.
NETWORKS = {
  'wrn': (models.create('wrn_10_1', 4), (8, 8, 1)),
  'wrn of four stages': (models.create('wrn_37_2', 4), (32, 32, 3)),
  'fast': (models.create('fast_8_16', 4), (8, 8, 1)),
  # A stem that halves, and sides that are odd.
  'fast of large images': (models.create('fast_8_16_16', 4), (33, 45, 3)),
  'resnet': (
    resnet.ResNet(4, blocks=(2, 1), width=8),
    (32, 24, 3),
  ),
  'vit': (
    vit.VisionTransformer(4, patch=4, size=24, depth=2, num_heads=3),
    (16, 8, 3),
  ),
  'evaluated head': (
    fast.FastNet(4, (8,), heads=(Head('other', evaluated=True),)),
    (8, 8, 3),
  ),
}


@pytest.mark.parametrize('name', NETWORKS)
def test_every_network_is_itself_in_every_format(name):
  model, shape = NETWORKS[name]
  config = importlib.import_module('configs.digits').get_config()
  dataset = {'image_shape': shape, 'class_names': [*'abcd']}
  variables = random_variables(model, shape)
  trained = load.Trained(config, dataset, 1, model, variables)
  pixels = np.random.default_rng(0).integers(0, 256, (18, *shape), np.uint8)
  normal = (pixels / 255 - np.array(config.mean)) / np.array(config.std)
  run = jax.jit(lambda v, x: model.apply(v, x, train=False).logits)
  wanted = np.asarray(nn.softmax(run(variables, normal.astype('f4'))))
  assert np.ptp(wanted, 0).max() > 0.01  # Images are told apart.
  cumsum = jax.numpy.cumsum
  for suffix, read in (
    ('.stablehlo', exported.open_stablehlo),
    ('.onnx', exported.open_onnx),
  ):
    run = read(formats.encode(suffix, trained, {}))
    for number in (18, 1, 0):
      found = run(pixels[:number])
      assert found.dtype == np.float32
      np.testing.assert_allclose(found, wanted[:number], atol=1e-5)
  assert jax.numpy.cumsum is cumsum  # jax2onnx would leave its own.


def test_weights_are_those_that_another_reader_finds(files, workdir):
  path = files / 'model.safetensors'
  found = safetensors.numpy.load_file(path)
  variables = load.load_trained(Workdir(workdir)).variables
  flat = {
    '/'.join(key.key for key in path): value
    for path, value in jax.tree.leaves_with_path(variables)
  }
  assert found.keys() == flat.keys()
  assert 'params/classifier/kernel' in found
  for name, value in flat.items():
    np.testing.assert_array_equal(found[name], value)
  with safetensors.safe_open(path, 'numpy') as file:
    about = json.loads(file.metadata()['flatmatch_jax'])
  assert tuple(about['class_names']) == ODD


@pytest.mark.parametrize('suffix', exported.SUFFIXES)
def test_a_file_is_loaded_as_the_run(files, images, expected, suffix):
  classifier = flatmatch_jax.load(files / f'model{suffix}')
  assert classifier.class_names == ODD
  assert classifier.image_size == (8, 8)
  assert classifier.about['step'] == 400
  for found in (
    classifier.probabilities(images),
    classifier.probabilities(images[..., 0]),
  ):
    np.testing.assert_allclose(found, expected, atol=1e-5)
  assert classifier.probabilities(images[:0]).shape == (0, 10)


def test_the_example_of_the_page_runs(files, images, expected, monkeypatch):
  """It needs onnxruntime, numpy and Pillow, and nothing of this package."""
  text = (runs.ROOT / 'docs' / 'own_images.md').read_text()
  (code,) = re.findall(r'```python\n(import json\n.*?)```', text, re.DOTALL)
  monkeypatch.chdir(files)
  Image.fromarray(images[0, ..., 0]).save('photo.jpg', format='PNG')
  found = {}
  exec(code.replace("'RGB'", "'L'"), found)
  np.testing.assert_allclose(found['probabilities'], expected[0], atol=1e-5)


def test_command_writes_both_files(call, workdir, tmp_path, images, expected):
  out = tmp_path / 'a model.ONNX'
  code, stdout, stderr = call('--workdir', workdir, '--out', out)
  assert code == 0
  assert 'agrees with the run on 256 test images of the run' in stderr
  assert 'not ended' not in stderr
  assert str(out) in stdout
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    'a model.ONNX',
    'a model.ONNX.json',
  ]
  about = json.loads((tmp_path / 'a model.ONNX.json').read_text())
  assert tuple(about['class_names']) == ODD
  assert about['resize']['cover'] == [8, 8]
  assert about['run']['error_percent'] == {'test': 12.5}
  assert about['checked']['images'] == 256
  assert about['checked']['difference'] < 1e-5
  session = onnxruntime.InferenceSession(out)
  (found,) = session.run(None, {'images': images})
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_unfinished_run_is_exported_with_a_note(call, tmp_path):
  """In float32, and without the folders of its user."""
  home = tmp_path / 'secret'
  run = make_run(
    tmp_path / 'run',
    steps=3,
    dtype='bfloat16',
    data_dir=f'{home}/data',
    compilation_cache=f'{home}/compiled',
  )
  out = tmp_path / 'model.stablehlo'
  code, _, stderr = call('--workdir', run, '--out', out)
  assert code == 0
  assert 'step 3 of 400' in stderr
  assert 'computes in bfloat16; the file does in float32' in stderr
  about = json.loads((tmp_path / 'model.stablehlo.json').read_text())
  assert (about['run']['step'], about['run']['steps']) == (3, 400)
  assert about['run']['config']['dtype'] == 'float32'
  assert 'secret' not in json.dumps(about)


def test_models_of_the_package_have_names(
  call, files, images, expected, monkeypatch, tmp_path
):
  for name in ('.safetensors', '.safetensors.json'):
    content = (files / f'model{name}').read_bytes()
    (tmp_path / f'tiny{name}').write_bytes(content)
  monkeypatch.setattr(exported, 'SHIPPED', tmp_path)
  found = flatmatch_jax.load('tiny').probabilities(images)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  Image.fromarray(images[0, ..., 0]).save(tmp_path / 'a.png')
  code, stdout, _ = call('--model', 'tiny', tmp_path / 'a.png', module=predict)
  assert code == 0
  assert f',{expected[0].argmax()},' in stdout
  with pytest.raises(UserError, match='with the package: tiny'):
    flatmatch_jax.load('huge.onnx')


# Refusals.


def test_a_file_that_disagrees_is_not_written(
  call, workdir, tmp_path, monkeypatch
):
  out = tmp_path / 'model.stablehlo'
  out.write_text('of last week')
  normalize = formats.augment.normalize
  encode = formats.encode

  def wrong(*args):
    with monkeypatch.context() as patch:
      patch.setattr(
        formats.augment, 'normalize', lambda x, *a: normalize(255 - x, *a)
      )
      return encode(*args)

  monkeypatch.setattr(formats, 'encode', wrong)
  code, _, stderr = call('--workdir', workdir, '--out', out)
  assert code == 2
  check_line(stderr, ['.stablehlo', 'disagrees', 'test images', 'another'])
  assert [p.name for p in tmp_path.iterdir()] == ['model.stablehlo']
  assert out.read_text() == 'of last week'


@pytest.mark.parametrize(
  ('args', 'named'),
  [
    ([], ['--out model.onnx', '--page']),
    (['--out', 'model.pt'], ['model.pt', '.onnx, .stablehlo, .safetensors']),
    (['--out', 'no/model.onnx'], ['no/model.onnx', 'there is no']),
    (['--page', 'page'], ['page', '.html']),
    (['--page', 'page.html'], ['npm pack onnxruntime-web@']),
    (['--out', 'model.onnx', '--images', 'no.png'], ['no.png']),
    (['--out', 'model.onnx', '--images', '.'], ['No images', '.jpg']),
    (['--out', 'model.onnx', '--images', __file__], [__file__, 'not one of']),
    (['--out', 'model.onnx', '--checkpoint', 'first'], ["'first'", 'best']),
  ],
)
def test_wrong_arguments_are_one_line(
  call, workdir, args, named, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  code, _, stderr = call('--workdir', workdir, *args)
  assert code == 2
  check_line(stderr, named)
  assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run_is_one_line(call, tmp_path):
  code, _, stderr = call(
    '--workdir', tmp_path, '--out', tmp_path / 'a.safetensors'
  )
  assert code == 2
  check_line(stderr, [str(tmp_path), 'is not the folder of a run'])


@pytest.mark.parametrize('package', ['jax2onnx', 'onnx', 'onnxruntime'])
def test_a_missing_package_names_the_extra(
  call, workdir, tmp_path, monkeypatch, package
):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name: None if name == package else find_spec(name),
  )
  out = tmp_path / 'model.onnx'
  code, _, stderr = call('--workdir', workdir, '--out', out)
  assert code == 2
  check_line(stderr, [package, "pip install -e '.[export]'"])


def change(name, edit):
  def function(folder):
    path = folder / name
    path.write_bytes(edit(path.read_bytes()))

  return function


def edit_json(edit):
  return change(
    'model.onnx.json', lambda x: json.dumps(edit(json.loads(x))).encode()
  )


DAMAGES = {
  'cut off': (change('model.onnx', lambda x: x[:-1]), ['checksum']),
  'other weights': (
    change('model.safetensors', lambda x: x[:-4] + bytes(4)),
    ['checksum'],
  ),
  'no JSON': (
    lambda folder: (folder / 'model.onnx.json').unlink(),
    ['model.onnx.json', 'keep them together'],
  ),
  'not JSON': (change('model.onnx.json', lambda x: x[:-9]), ['.json']),
  'empty JSON': (edit_json(lambda x: {}), ['model.onnx.json']),
  'huge images': (
    edit_json(lambda x: x | {'image_shape': [10**9, 10**9, 1]}),
    ['model.onnx.json'],
  ),
  'no checksum': (edit_json(lambda x: x | {'sha256': 1}), ['not describe']),
  'other network': (
    change(
      'model.safetensors.json', lambda x: x.replace(b'fast_8_16', b'fast_8_32')
    ),
    ['weights of fast_8_32', 'another shape'],
  ),
  'no network': (
    change(
      'model.safetensors.json', lambda x: x.replace(b'fast_8_16', b'fast_0')
    ),
    ['fast_0'],
  ),
}


@pytest.mark.parametrize('case', DAMAGES)
def test_damaged_files_are_one_line(files, case, tmp_path):
  damage, named = DAMAGES[case]
  for path in files.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  damage(tmp_path)
  suffix = 'safetensors' if 'network' in case or 'weights' in case else 'onnx'
  with pytest.raises(UserError) as caught:
    flatmatch_jax.load(tmp_path / f'model.{suffix}')
  assert '\n' not in str(caught.value)
  for words in named:
    assert words in str(caught.value)


# Images for the check.


def test_without_its_data_a_run_is_checked_on_others(
  call, workdir, images, tmp_path, monkeypatch
):
  def gone(*args):
    raise UserError('The data are gone.')

  monkeypatch.setattr(load, 'load_data', gone)
  out = tmp_path / 'model.safetensors'
  code, _, stderr = call('--workdir', workdir, '--out', out)
  assert code == 0
  assert 'The data are gone. The check uses made-up images' in stderr
  assert (
    json.loads((tmp_path / 'model.safetensors.json').read_text())['checked'][
      'of'
    ]
    == 'made-up images'
  )
  Image.fromarray(images[0, ..., 0]).save(tmp_path / 'a.png')
  (tmp_path / 'b.png').write_text('not an image')
  code, _, stderr = call(
    '--workdir', workdir, '--out', out, '--images', tmp_path
  )
  assert code == 0
  assert 'on 1 images given by --images' in stderr
