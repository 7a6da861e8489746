"""Files and arguments of the commands that are wrong: one line, no change."""

import hashlib
import importlib
import io
import json
import shutil
import struct
import types
import zlib

import jax
import numpy as np
from PIL import Image, ImageFile
import pytest
from refusals import check_line, file, start

from flatmatch_jax import analyze, data, evaluate, experiments, predict, preview
from flatmatch_jax.data import images, splits
from flatmatch_jax.report import __main__ as report
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, sharding
from flatmatch_jax.training import fixed_labels, loop, program, setup
from flatmatch_jax.types import DatasetInfo, UserError


def digest(folder):
  """Names and content of all that lies below."""
  return {
    str(path.relative_to(folder)): path.is_file()
    and hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob('*'))
  }


# Arguments of commands.

ARGUMENTS = [
  (evaluate, [], ['--workdir']),
  (evaluate, ['--workdir'], ['--workdir', 'expected one argument']),
  (evaluate, ['--workdir=/none', '--steps=3'], ['--steps=3']),
  (evaluate, ['--workdir=/none', 'more'], ['more']),
  (evaluate, ['--workdir=/none'], ['/none', 'config.json']),
  (evaluate, [f'--workdir={__file__}'], [__file__]),
  (predict, [], ['paths']),
  (predict, ['a.png'], ['--workdir', '--model']),
  (predict, ['--workdir=/none'], ['paths']),
  (predict, ['--workdir=/none', '/none.png'], ['/none.png', 'not exist']),
  (predict, ['--workdir=/none', __file__, '--out=/'], ['/', 'is a folder']),
  (
    predict,
    ['--workdir=/none', __file__, '--out=/none/a.csv'],
    ['/none/a.csv', 'no /none'],
  ),
  (
    predict,
    ['--workdir=/none', __file__, '--out=/dev/null'],
    ['/dev/null', 'device'],
  ),
  (
    predict,
    ['--workdir=/none', __file__, '--out=a.xlsx'],
    ['a.xlsx', '.csv or .jsonl'],
  ),
  (predict, ['--model=/none/m.onnx', __file__], ['There is no /none/m.onnx.']),
  (
    predict,
    ['--model=m.onnx.json', __file__],
    ['m.onnx.json', 'name the model: m.onnx.'],
  ),
  (preview, [], ['--out']),
  (preview, ['--out=/none/a.png'], ['/none/a.png', 'no /none']),
  (preview, ['--config=none.py', '--out=a.png'], ['none.py']),
  (experiments, ['table9'], ["'table9'", "Did you mean 'table1'?"]),
  (experiments, ['table1', '--seeds', 'x'], ['--seeds', "'x'"]),
  (experiments, ['table1', '--seeds'], ['--seeds', 'at least one']),
  (experiments, ['table1', '--seeds', '-1'], ['--seeds', '-1']),
  (experiments, ['table1', f'--seeds={2**32}'], ['at most 4294967295']),
  (experiments, ['--dryrun'], ['--dryrun']),
  (analyze, [], ['--workdir']),
  (analyze, ['--workdir=/none'], ['/none', 'not the folder of a run']),
  (analyze, ['--workdir=/none', '--what=shape'], ["'shape'", 'sharpness']),
  *(
    (analyze, ['--workdir=/none', wrong], [wrong])
    for wrong in ('--points=4', '--images=0', '--rotate=-1')
  ),
  (report, [], ['--workdir']),
  (report, ['--workdir=/none'], ['/none', 'config.json']),
]


@pytest.mark.parametrize(('module', 'args', 'named'), ARGUMENTS)
def test_wrong_arguments_are_one_line(
  module, args, named, monkeypatch, call, tmp_path
):
  monkeypatch.chdir(tmp_path)
  code, _, stderr = call(module, *args)
  assert code == 2
  check_line(stderr, named)
  assert not list(tmp_path.iterdir())


# Labels, for which no run begins.


@pytest.mark.parametrize(
  ('content', 'named'),
  [
    (b'', ['no index']),
    (b'\x80\x04\x95', ['cannot be read']),
    (b'[' * 10**6, ['not valid']),
    (b'\x1b[31m', ['\\x1b[31m']),
    (None, ['Is a directory']),
  ],
)
def test_what_is_no_labels_file_is_one_line(
  content, named, monkeypatch, capfd, tmp_path
):
  path = tmp_path / 'labels.json'
  path.mkdir() if content is None else path.write_bytes(content)
  check_labels(path, named, monkeypatch, capfd, tmp_path)


def check_labels(path, named, monkeypatch, capfd, tmp_path):
  with pytest.raises(SystemExit) as end:
    start(
      monkeypatch, f'--config.labels_file={path}', f'--workdir={tmp_path}/run'
    )
  assert end.value.code == 2
  check_line(capfd.readouterr().err, [str(path), *named])
  assert not (tmp_path / 'run').exists()


# Images.


def chunk(kind, content):
  crc = zlib.crc32(kind + content)
  return struct.pack('>I', len(content)) + kind + content + crc.to_bytes(4)


def png(width, height, *chunks):
  """A file that claims this size, and has no pixels."""
  header = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
  chunks = (chunk(b'IHDR', header), *chunks, chunk(b'IEND', b''))
  return b'\x89PNG\r\n\x1a\n' + b''.join(chunks)


def saved(kind, size=(16, 16), mode='RGB', **options):
  buffer = io.BytesIO()
  Image.new(mode, size, 77).save(buffer, kind, **options)
  return buffer.getvalue()


def tiff(width, height):
  """A header with these sizes and one strip."""
  entries = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1}
  entries |= {278: height, 279: 64}
  body = struct.pack('<H', len(entries)) + b''.join(
    struct.pack('<HHII', tag, 4, 1, value) for tag, value in entries.items()
  )
  return b'II*\0\x08\0\0\0' + body + bytes(4)


HUGE = zlib.compress(bytes(10**8))
IMAGES = {
  'empty': b'',
  'text': b'not an image',
  'cut': saved('PNG')[:-30],
  'pickle': b'\x80\x04\x95',
  'floats': saved('TIFF', mode='F'),
  'wide png': png(2**31 - 1, 1),
  'large png': png(2**14, 2**14),
  'large png that Pillow would open': png(9200, 9200),
  'no pixels': png(16, 16),
  'text of a png': png(16, 16, chunk(b'zTXt', b'a\0\0' + HUGE)),
  'profile of a png': png(16, 16, chunk(b'iCCP', b'a\0\0' + HUGE)),
  'large gif': b'GIF89a\xff\xff\xff\xff\0\0\0' + saved('GIF')[13:],
  'large bmp': saved('BMP')[:18]
  + struct.pack('<ii', 2**15, 2**15)
  + saved('BMP')[26:],
  'large tiff': tiff(2**16, 2**16),
  'large webp': b'RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0' + b'\xff' * 6,
}


@pytest.mark.parametrize('case', IMAGES)
def test_wrong_images_are_refused_unread(case, tmp_path, monkeypatch):
  path = tmp_path / 'a.png'
  path.write_bytes(IMAGES[case])
  if 'large' in case or 'wide' in case:
    decoded = lambda *_: pytest.fail('decoded')
    monkeypatch.setattr(ImageFile.ImageFile, 'load', decoded)
  with pytest.raises(ValueError, match=r'\w') as caught:
    images.read(path, (8, 8, 3))
  assert len(str(caught.value)) <= 200


def test_folder_of_wrong_images_is_one_line(monkeypatch, capfd, tmp_path):
  for name in ('labeled/cat', 'labeled/dog', 'unlabeled'):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / 'a.png').write_bytes(saved('PNG'))
  for number, content in enumerate(IMAGES.values()):
    (tmp_path / 'unlabeled' / f'\x1b[2J{number}.png').write_bytes(content)
  before = digest(tmp_path / 'unlabeled')
  with pytest.raises(SystemExit) as end:
    start(
      monkeypatch,
      file('folder'),
      f'--config.data_dir={tmp_path}',
      f'--workdir={tmp_path}/run',
    )
  assert end.value.code == 2
  check_line(
    capfd.readouterr().err,
    [f'{len(IMAGES)} of the {len(IMAGES) + 1} files', '\\x1b[2J0.png'],
  )
  assert digest(tmp_path / 'unlabeled') == before
  assert not (tmp_path / 'run').exists()


# Runs of other networks and other data, and edited ones.


@pytest.fixture(scope='module')
def runs(tmp_path_factory, tiny_network):
  """A run of one step that was not taken, and one of another network."""
  folder = tmp_path_factory.mktemp('runs')
  dataset = data.load('digits')
  for model in ('wrn_10_1', 'wrn_10_2'):
    config = importlib.import_module('configs.digits').get_config(
      'method=supervised'
    )
    config.model = model
    files = Workdir(folder / model)
    split = setup.choose_split(config, dataset)
    setup.write_description(files, config, dataset, split)
    made = program.create(
      config, DatasetInfo(10, 1437, 1437, (1,) * 10), (8, 8, 1)
    )
    everywhere = sharding.replicated(sharding.make_mesh())
    init = jax.jit(made.init, out_shardings=everywhere)
    checkpoints = Checkpoints(files.checkpoints)
    notes = {'seconds': 0.0, 'class_names': list(dataset.class_names)}
    checkpoints.save(1, init(jax.random.key(0)), notes, 90.0)
    checkpoints.close()
  return folder


def edit(name, change):
  """Changes a JSON file of a run."""

  def function(run):
    path = run / name
    content = change(json.loads(path.read_text()))
    path.write_text(json.dumps(content))

  return function


def other_network(run):
  shutil.rmtree(run / 'checkpoints')
  shutil.copytree(
    run.with_name('wrn_10_2') / 'checkpoints', run / 'checkpoints'
  )


def no_state(run):
  shutil.rmtree(run / 'checkpoints' / '1' / 'state')


def no_checkpoint(run):
  shutil.rmtree(run / 'checkpoints' / '1')


def file_for_checkpoints(run):
  shutil.rmtree(run / 'checkpoints')
  (run / 'checkpoints').write_text('none')


# What is done to a run, and what the line names.
EDITS = {
  'network copied in': (other_network, ['another network']),
  'network': (
    edit('config.json', lambda x: x | {'model': 'wrn_10_2'}),
    ['another network'],
  ),
  'method': (
    edit(
      'config.json',
      lambda x: x | {'method': 'freematch', 'variant': {'method': 'freematch'}},
    ),
    ['another network, method'],
  ),
  'no method': (edit('config.json', lambda x: x | {'method': 'none'}), []),
  'text for steps': (
    edit('config.json', lambda x: x | {'steps': 'many'}),
    ["config.steps='many'", 'a whole number'],
  ),
  'no field': (
    edit('config.json', lambda x: {k: x[k] for k in x if k != 'model'}),
    ["no field 'model'"],
  ),
  'no config': (edit('config.json', lambda x: [x]), ['config.json']),
  'two classes': (
    edit('dataset.json', lambda x: x | {'class_names': ['a', 'b']}),
    ['number of classes'],
  ),
  'names of classes': (
    edit('dataset.json', lambda x: x | {'class_names': [*'abcdefghij']}),
    ['dataset.json', 'a, b, c'],
  ),
  'huge images': (
    edit('dataset.json', lambda x: x | {'image_shape': [10**9, 10**9, 1]}),
    ['dataset.json'],
  ),
  'no share': (
    edit('dataset.json', lambda x: x | {'test_share': 0}),
    ['dataset.json'],
  ),
  'no data': (edit('dataset.json', lambda x: {}), ['dataset.json']),
  'no state': (no_state, ['checkpoint']),
  'no checkpoint': (no_checkpoint, ['checkpoint']),
  'file for checkpoints': (file_for_checkpoints, ['checkpoint']),
}


@pytest.mark.parametrize('case', EDITS)
def test_edited_runs_are_one_line(case, runs, call, tmp_path):
  change, named = EDITS[case]
  shutil.copytree(runs, tmp_path / 'runs')
  run = tmp_path / 'runs' / 'wrn_10_1'
  change(run)
  (tmp_path / 'a.png').write_bytes(saved('PNG'))
  before = digest(tmp_path)
  commands = [(evaluate, []), (predict, [tmp_path / 'a.png'])]
  if case == 'method':  # To classify takes the network only.
    commands.pop()
  for module, args in commands:
    code, _, stderr = call(module, '--workdir', run, *args)
    assert code == 2
    check_line(stderr, named)
    assert digest(tmp_path) == before


FIXED = {'index': [3, 7, 12], 'label': [0, 9, 1], 'confidence': [1.0] * 3}
FIXED['crc32'] = splits._crc32(FIXED['index'], FIXED['label'])


@pytest.mark.parametrize(
  'change',
  [
    {'index': [3, 7, 13]},
    {'label': [0, 9, 2]},
    {'crc32': 1},
    {'label': None},
    {'index': [3.0, 7.0, 12.0]},
    {'index': [3, 7, 2**70]},
    # As by somebody who knows how.
    {'index': [3, 7, 20], 'crc32': splits._crc32([3, 7, 20], [0, 9, 1])},
    {'label': [0, 9, 10], 'crc32': splits._crc32([3, 7, 12], [0, 9, 10])},
    {'index': [-1, 7, 12], 'crc32': splits._crc32([-1, 7, 12], [0, 9, 1])},
  ],
)
def test_changed_labels_that_were_fixed_are_refused(change, tmp_path):
  assert splits.are_fixed(FIXED, num_train=20, num_classes=10)
  (tmp_path / 'fixed.json').write_text(json.dumps(FIXED | change))
  config = importlib.import_module('configs.digits').get_config(
    'method=flatmatch_fix'
  )
  state = types.SimpleNamespace(step=config.recipe_args.pretrain_steps + 1)
  dataset = types.SimpleNamespace(
    train_labels=[0] * 20, class_names=[*range(10)]
  )
  with pytest.raises(UserError, match=r'fixed\.json is not what .* Put back'):
    fixed_labels.choose(config, Workdir(tmp_path), None, dataset, None, state)


def test_a_choice_of_no_labels_is_taken():
  nothing = np.zeros(0)
  chosen = splits.most_confident(nothing, nothing, [], 5, nothing)
  assert chosen['index'] == []
  assert splits.are_fixed(chosen, num_train=20, num_classes=10)


def test_a_run_does_not_go_on_from_another_network(
  runs, monkeypatch, capfd, tmp_path
):
  shutil.copytree(runs, tmp_path / 'runs')
  run = tmp_path / 'runs' / 'wrn_10_1'
  other_network(run)
  before = digest(tmp_path)
  config = Workdir(run).config()
  with pytest.raises(SystemExit) as end, cli.errors_as_lines():
    loop.train_and_evaluate(config, str(run))
  assert end.value.code == 2
  *_, line = capfd.readouterr().err.splitlines(keepends=True)
  check_line(line, ['another network', '--workdir'])
  assert digest(tmp_path) == before
