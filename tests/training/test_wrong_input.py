"""Wrong input ends in one line before any work, and changes nothing."""

import contextlib
import importlib
import re
import subprocess
import sys
from typing import Annotated

import pytest
from refusals import check_line, file, start
from runs import ROOT

from flatmatch_jax import methods
from flatmatch_jax.methods.base import Method
from flatmatch_jax.step import recipes
from flatmatch_jax.system import cli
from flatmatch_jax.system.arguments import whole
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import rules
from flatmatch_jax.types import UserError

DATASETS = (
  'digits',
  'cifar10',
  'cifar100',
  'svhn',
  'stl10',
  'imagenet30',
  'imagenet',
)


METHODS = ('supervised', 'fixmatch', 'freematch', 'flatmatch', 'flatmatch_e')
FIELDS = (
  'batch_norm',
  'checkpoint_every',
  'data_dir',
  'eval_every',
  'log_every',
  'method_args.fairness_weight',
  'recipe_args.rho',
  'seed',
  'split_seed',
  'steps',
)
MODELS = ('wrn_DEPTH_WIDTH', 'wrn_28_2', 'wrn_37_2')
PAPER_LABELS = ('40', '100', '400')
KEYS = ('method', 'labels', 'seed', 'split_seed')

# Arguments, and what the line must name: the wrong value and what is known.
WRONG = (
  {
    'method': ([file(arg='method=fixmach')], ["'fixmach'", *METHODS]),
    'no method': ([file(arg='method=')], ["''", *METHODS]),
    'recipe': (
      [file(arg='method=fixmatch+flat')],
      ["'fixmatch+flat'", *METHODS],
    ),
    'recipe without a method': ([file(arg='method=+flatmatch')], METHODS),
    'supervised+flatmatch': (
      [file(arg='method=supervised+flatmatch')],
      ["'supervised+flatmatch'", 'no meaning', 'supervised'],
    ),
    'supervised+flatmatch_e': (
      [file(arg='method=supervised+flatmatch_e')],
      ["'supervised+flatmatch_e'", 'no meaning', 'supervised'],
    ),
    'dataset': (['--config.dataset=mnist'], ["'mnist'", *DATASETS]),
    'key': ([file(arg='lables=40')], ["'lables=40'", *KEYS]),
    'key without a value': ([file(arg='seed=1,labels')], ["'labels'", *KEYS]),
    'labels 41': ([file(arg='labels=41')], ['41', '10 classes', *PAPER_LABELS]),
    'labels 0': ([file(arg='labels=0')], ['labels=0', *PAPER_LABELS]),
    'labels -10': ([file(arg='labels=-10')], ['labels=-10', *PAPER_LABELS]),
    'labels abc': ([file(arg='labels=abc')], ['labels=abc', 'whole number']),
    'labels beyond': ([file(arg='labels=100000')], ['100000', 'fewer']),
    'labels of CIFAR-100': (
      [file('cifar100', 'labels=40')],
      ['labels=40', '100 classes', '400', '2500', '10000'],
    ),
    'seed': ([file(arg='seed=1.5')], ['seed=1.5', 'whole number']),
    'field': (['--config.stepz=5'], ["'stepz'", *FIELDS]),
    'field of a part': (
      ['--config.method_args.treshold=0.9'],
      ["'method_args.treshold'", *FIELDS],
    ),
    'field of a number': (['--config.steps.first=5'], ['steps.first']),
    'model': (['--config.model=resnet50'], ["'resnet50'", *MODELS]),
    'depth': (['--config.model=wrn_11_2'], ["'wrn_11_2'", *MODELS]),
    'width': (['--config.model=wrn_28_0'], ["'wrn_28_0'", *MODELS]),
    'width of four stages': (
      ['--config.model=wrn_37_0'],
      ["'wrn_37_0'", *MODELS],
    ),
    'optimizer': (['--config.optimizer=adam'], ["'adam'", 'sgd, adamw']),
    'pretrained': (
      ['--config.pretrained=weights.npz'],
      ["'weights.npz'", 'for a ViT'],
    ),
    'no such weights': (
      ['--config.model=vit_tiny_2', '--config.pretrained=weights.npz'],
      ["'weights.npz'", 'not a file'],
    ),
    'weights of one network of two': (
      [
        file(arg='method=mpl'),
        '--config.model=vit_tiny_2',
        '--config.pretrained=weights.npz',
      ],
      ["'weights.npz'", 'mpl'],
    ),
    'groups of a ViT': (
      ['--config.model=vit_tiny_2', '--config.recipe_args.groups=2'],
      ['groups=2', 'vit_tiny_2'],
    ),
    'groups and microbatches': (
      ['--config.recipe_args.groups=4', '--config.microbatches=3'],
      [
        'batch_size=32',
        'by 96:',
        '4 of config.recipe_args.groups',
        'microbatches=3',
        'are 96',
      ],
    ),
    'microbatches and devices of a CPU': (
      ['--config.cpu_devices=2', '--config.microbatches=2'],
      ['cpu_devices=2', 'microbatches=2', 'for ever', 'at 0'],
    ),
    'groups and devices of a CPU': (
      ['--config.cpu_devices=2', '--config.recipe_args.groups=2'],
      ['cpu_devices=2', '2 of config.recipe_args.groups'],
    ),
    'microbatches and devices': (
      ['--config.batch_size=40', '--config.microbatches=4'],
      ['batch_size=40', '8 devices', 'microbatches=4', '32 and 64'],
    ),
    'labels fixed too late': (
      [
        file(arg='method=flatmatch_fix'),
        '--config.recipe_args.pretrain_steps=400',
      ],
      ['pretrain_steps=400', 'steps=400', '40 are fewer than the 100'],
    ),
    'dtype': (['--config.dtype=float16'], ["'float16'", 'float32, bfloat16']),
    'patch': (
      [file('imagenet', 'model=vit_base_15')],
      ['vit_base_15', 'patches of 15', 'image_size=224'],
    ),
    'long tail of all labels': (
      [file(arg='labels=all'), '--config.imbalance=10'],
      ['imbalance=10', 'labels=all'],
    ),
    'long tail of a file': (
      ['--config.labels_file=mine.json', '--config.imbalance=10'],
      ['imbalance=10', 'mine.json'],
    ),
    'batch_norm': (
      ['--config.batch_norm=both'],
      ["'both'", 'joint', 'clean_strong', 'split'],
    ),
    'method set late': (
      ['--config.method=fixmatch'],
      ["'fixmatch'", "'flatmatch'", 'FILE.py:method=fixmatch'],
    ),
    'labels set late': (
      ['--config.labels=100'],
      ['100', '40', 'FILE.py:labels=100'],
    ),
    'batch and devices': (
      ['--config.batch_size=12'],
      ['batch_size=12', '8 devices', '8 and 16'],
    ),
    'unlabeled batch and devices': (
      ['--config.unlabeled_batch_size=3'],
      ['unlabeled_batch_size=3', '8 devices', 'are 8'],
    ),
    'devices that do not share': (
      ['--config.mesh.fsdp=3'],
      ['mesh.fsdp=3', 'devices, 8', '1, 2, 4, 8'],
    ),
    'nobody to share with': (['--config.mesh.fsdp=0'], ['mesh.fsdp=0']),
    'no number': (['--config.steps=abc'], ['--config.steps=abc']),
    'no whole number': (['--config.steps=1.5'], ['--config.steps=1.5']),
    'labels file': (['--config.labels_file=/none.json'], ['/none.json']),
    'config file': (
      [f'--config={ROOT}/configs/mnist.py'],
      ['configs/mnist.py', *(f'{name}.py' for name in DATASETS)],
    ),
    'flag': (['--worksdir=runs'], ["'worksdir'", 'workdir']),
    'stray argument': (['digits'], ["'digits'", '--config', '--workdir']),
    'underscore in a number': (
      [file(arg='labels=1_0')],
      ['labels=1_0', 'not a whole number'],
    ),
    'near method': (
      [file(arg='method=flatmach')],
      ["'flatmach'", "Did you mean 'flatmatch'?"],
    ),
    'near dataset': (
      ['--config.dataset=digit'],
      ["'digit'", "Did you mean 'digits'?"],
    ),
    'near key': ([file(arg='label=40')], ["Did you mean 'labels'?"]),
    'near field': (['--config.lok_every=5'], ["Did you mean 'log_every'?"]),
    'near field of a part': (
      ['--config.recipe_args.roh=0.1'],
      ["Did you mean 'recipe_args.rho'?"],
    ),
    'near flag': (['--workdirr=x'], ['Did you mean: workdir']),
    'no field': (['--config.='], ["''", 'FIELD=VALUE']),
    'no config': (['--config='], ['no config file']),
    'folder as config': ([f'--config={ROOT}/configs'], ['no config file']),
    'value left out': (['--config.steps'], ['--config.steps', 'whole number']),
    'group of fields': (
      ['--config.method_args=3'],
      ['method_args=3', 'one by one'],
    ),
    'labels=all too late': (
      ['--config.labels=all'],
      ['labels=all', 'FILE.py:labels=all'],
    ),
    'deep model': (['--config.model=wrn_1000000_2'], ['up to 1000', *MODELS]),
    'wide model': (['--config.model=wrn_28_1000000'], ['up to 100', *MODELS]),
    'digits of another script': (['--config.model=wrn_٢٨_2'], MODELS),
    'model beyond memory': (
      ['--config.model=wrn_100_100'],
      ['wrn_100_100', 'GiB', 'smaller config.model'],
    ),
    'batch beyond memory': (
      ['--config.batch_size=1000000000'],
      ['GiB', 'of memory', 'config.batch_size'],
    ),
    'unlabeled batch beyond memory': (
      ['--config.unlabeled_batch_size=1000000000'],
      ['GiB', 'of memory', 'config.unlabeled_batch_size'],
    ),
    'evaluation beyond memory': (
      ['--config.eval_batch_size=2000000000'],
      ['GiB', 'of memory', 'config.eval_batch_size'],
    ),
    'patch of other images': (
      [file(), '--config.model=vit_tiny_3'],
      ['8', '3'],
    ),
    'text as mean': (['--config.mean=abc'], ["config.mean='abc'", 'a number']),
    'NaN as mean': (['--config.mean=(nan,)'], ['config.mean=', 'a number']),
    'mean of other pixels': (
      ['--config.mean=(127.5,)'],
      ['config.mean=127.5', 'as pixels are'],
    ),
    'zero as std': (['--config.std=(0.0,)'], ['config.std=0', 'above 0']),
    'two means': (['--config.mean=(0.1, 0.2)'], ['2 numbers', '1 channels']),
    'no means': (['--config.mean=()'], ['0 numbers', '1 channels']),
    'thresholds': (
      [
        '--config.method_args.min_threshold=0.9',
        '--config.method_args.max_threshold=0.8',
      ],
      ['min_threshold=0.9', 'max_threshold=0.8'],
    ),
    'schedule of uda': (
      [file(arg='method=uda'), '--config.method_args.tsa=quick'],
      ["'quick'", 'linear'],
    ),
    'shift': (['--config.pad=8'], ['config.pad=8', 'below the 8 pixels']),
    'weights of a folder': (
      ['--config.model=vit_tiny_2', '--config.pretrained=/tmp'],
      ["'/tmp'", 'not a file'],
    ),
    'weights that are none': (
      ['--config.model=vit_tiny_2', f'--config.pretrained={__file__}'],
      [__file__, '.safetensors'],
    ),
    'image size': (
      [file('folder', 'image_size=1000000'), '--config.data_dir=/tmp'],
      ['image_size=1000000', 'from 8 to 1024'],
    ),
    'image size 0': (
      [file('folder', 'image_size=0'), '--config.data_dir=/tmp'],
      ['image_size=0', 'from 8 to 1024'],
    ),
    'namespace of TFDS': (
      [file('tfds', 'name=huggingface:mnist')],
      ["'huggingface:mnist'", 'run code of others'],
    ),
    'path as a name of TFDS': (
      [file('tfds', 'name=../mnist')],
      ["'../mnist'", 'name/config'],
    ),
    'no name of TFDS': ([file('tfds')], ['name=mnist']),
    'no data_dir': ([file('folder')], ['data_dir is empty', 'DIR']),
    'missing data_dir': (
      [file('folder'), '--config.data_dir=/none'],
      ['/none', 'not a folder'],
    ),
    'file as data_dir': (
      [file('folder'), f'--config.data_dir={__file__}'],
      [__file__, 'not a folder'],
    ),
    'folder without data': (
      [file('folder'), f'--config.data_dir={ROOT}/configs'],
      ['configs', 'labeled/'],
    ),
    'folder as npz': (
      [file('npz'), f'--config.data_dir={ROOT}'],
      [str(ROOT), 'There is no file'],
    ),
    'text as npz': (
      [file('npz'), f'--config.data_dir={__file__}'],
      [__file__, 'zip'],
    ),
    'file as compilation cache': (
      [f'--config.compilation_cache={__file__}'],
      [f'compilation_cache={__file__}', 'a folder', 'leave it empty'],
    ),
    'compilation cache that cannot be made': (
      ['--config.compilation_cache=/proc/none'],
      ['compilation_cache=/proc/none', 'a folder', 'leave it empty'],
    ),
    'name that is too long': (
      [f'--config.labels_file={"x" * 5000}'],
      ['name too long'],
    ),
  }
  | {
    # Not even of the type of the field.
    f'{name}={value}': ([f'--config.{name}={value}'], [f'{name}={value}', rule])
    for name, values, rule in (
      ('steps', ('nan', 'text', 'true', '1,2', '', '1e3'), 'whole number'),
      ('seed', ('nan', 'text', '0.5'), 'whole number'),
      ('learning_rate', ('text', 'true', '1,2', ''), 'not a number'),
      ('recipe_args.rho', ('text', ''), 'not a number'),
      ('flip', ('2', 'text', 'nan'), 'neither true nor false'),
    )
    for value in values
  }
  | {
    f'{name}={value}': (
      [f'--config.{name}={value}'],
      [f'config.{name}={value}', rule],
    )
    for names, values, rule in (
      (
        (
          'steps',
          'batch_size',
          'unlabeled_batch_size',
          'microbatches',
          'log_every',
          'eval_every',
          'checkpoint_every',
          'eval_batch_size',
        ),
        ('0', '-8', '1000000000000', f'1{"0" * 30}'),
        'a whole number, at least 1 and at most 2147483647',
      ),
      (
        (
          'pad',
          'num_val',
          'max_skipped',
          'probe_every',
          'profile_steps',
          'warmup_steps',
        ),
        ('-1', '1000000000000'),
        'a whole number, at least 0',
      ),
      (('seed', 'split_seed'), ('-1', f'{2**64}'), 'at most 4294967295'),
      (
        ('ema_decay', 'bn_momentum', 'method_args.decay'),
        ('-0.1', '1.0', 'nan', 'inf'),
        'at least 0 and below 1',
      ),
      (
        ('learning_rate', 'imbalance', 'unlabeled_imbalance'),
        ('0.0', '-0.1', 'nan', 'inf', '1e+30'),
        'a number, above 0 and at most',
      ),
      (
        (
          'weight_decay',
          'recipe_args.rho',
          'method_args.fairness_weight',
          'method_args.weight',
        ),
        ('-0.1', 'nan', 'inf', '1e+30'),
        'a number, at least 0 and at most',
      ),
      (('num_val',), ('1400',), 'choose fewer'),
      (('microbatches',), ('5',), 'divisible'),
      (('warmup_steps',), ('400',), 'below config.steps=400'),
      (('layer_decay',), ('0.0', '1.5', 'nan'), 'above 0 and at most 1'),
      (('layer_decay',), ('0.5',), 'ViT under adamw'),
    )
    for name in names
    for value in values
  }
)


@pytest.mark.parametrize('case', WRONG)
def test_wrong_input_is_one_line(case, monkeypatch, capfd, tmp_path):
  args, named = WRONG[case]
  there = {'metrics.jsonl': '{"step": 1}\n', 'config.json': '{"mine": 1}'}
  for name, content in there.items():
    (tmp_path / name).write_text(content)
  with pytest.raises(SystemExit) as end:
    start(monkeypatch, *args, f'--workdir={tmp_path}')
  assert end.value.code == 2
  check_line(capfd.readouterr().err, named)
  found = {path.name: path.read_text() for path in tmp_path.iterdir()}
  assert found == there


def test_right_input_reaches_the_work(monkeypatch, tmp_path):
  """Or else the test above would prove nothing."""
  with pytest.raises(AssertionError, match='work has begun'):
    start(monkeypatch, '--config.steps=7', f'--workdir={tmp_path / "run"}')


ARGUMENTS = [
  (method, 'method_args', name)
  for method in methods.METHODS
  for name in methods.defaults(method)
] + [
  (recipe, 'recipe_args', name)
  for recipe in recipes.RECIPES
  if recipe != 'plain'
  for name in recipes.defaults(recipe)
]


@pytest.mark.parametrize(('method', 'part', 'name'), ARGUMENTS)
def test_every_argument_of_every_method_has_bounds(method, part, name):
  config = get_config('digits', f'method={method}')
  config_lib.check(config)
  default = config[part][name]
  wrong = [float('nan'), -1, float('inf'), 'text', True, None, (1,), 1e30]
  wrong += [] if isinstance(default, float) else [0.5]
  for value in wrong:
    with config.ignore_type():
      config[part][name] = value
    with pytest.raises(UserError, match=name):
      config_lib.check(config)


def test_a_method_states_the_bounds_of_its_arguments_itself(monkeypatch):
  def new(turns: Annotated[int, whole(1, 8)] = 2):
    return Method(lambda *args: None)

  monkeypatch.setitem(methods.METHODS, 'new', new)
  config = get_config('digits', 'method=new')
  config_lib.check(config)
  config.method_args.turns = 9
  message = (
    'config.method_args.turns=9 must be a whole number, at least 1 and at '
    'most 8. Set --config.method_args.turns.'
  )
  with pytest.raises(UserError, match=f'^{re.escape(message)}$'):
    config_lib.check(config)


@pytest.mark.parametrize('dataset', [*DATASETS, 'folder', 'npz', 'tfds'])
def test_every_field_has_a_rule(dataset):
  """Those of a source are checked with it."""
  known = {*rules.FIELDS, *rules.ELEMENTS, *rules.TYPES}
  of_sources = {'image_size', 'tfds_name', 'classes', 'fast'}
  assert set(get_config(dataset)) - known <= of_sources


@pytest.mark.parametrize('name', [*rules.FIELDS, *rules.ELEMENTS, *rules.TYPES])
def test_every_field_has_a_type(name):
  """A config of Python code, or of a workdir, may hold anything."""
  *path, field = name.split('.')
  for value in (None, [[]], {'a': 1}, b'1', 1j):
    config = get_config('digits')
    part = config[path[0]] if path else config
    with config.ignore_type():
      part[field] = value
    if isinstance(part[field], rules.TYPES.get(name, ())):
      continue
    with pytest.raises(UserError, match=f'config.{name}='):
      config_lib.check(config)
  del part[field]
  with pytest.raises(UserError, match=f'no field {name!r}'):
    config_lib.check(config)


def get_config(dataset, arg=''):
  return importlib.import_module(f'configs.{dataset}').get_config(arg)


def test_empty_unlabeled_pool_is_refused(monkeypatch, capfd, tmp_path):
  arg = 'method=fixmatch,labels=all'
  with pytest.raises(SystemExit) as end:
    start(
      monkeypatch,
      file(arg=arg),
      '--config.unlabeled_includes_labeled=false',
      f'--workdir={tmp_path / "run"}',
    )
  assert end.value.code == 2
  check_line(capfd.readouterr().err, ['unlabeled_includes_labeled'])
  assert not (tmp_path / 'run').exists()


def test_workdir_that_is_a_file_is_refused(monkeypatch, capfd, tmp_path):
  taken = tmp_path / 'run'
  taken.write_text('mine')
  with pytest.raises(SystemExit) as end:
    start(monkeypatch, '--config.steps=7', f'--workdir={taken}')
  assert end.value.code == 2
  check_line(capfd.readouterr().err, [str(taken)])
  assert taken.read_text() == 'mine'


def test_errors_of_the_program_stay_tracebacks():
  with pytest.raises(ZeroDivisionError), cli.errors_as_lines():
    _ = 1 / 0


def test_process_ends_with_one_line(tmp_path):
  """The real program; starting it takes seconds, so all at once."""
  commands = {
    'method': ['--config', f'{ROOT}/configs/digits.py:method=fixmach'],
    'field': ['--config.stepz=5'],
    'stray argument': ['digits'],
    'number of processes': ['--num_processes=two'],
  }
  named = {case: WRONG[case][1] for case in commands if case in WRONG} | {
    'number of processes': ['--num_processes=two', 'not a whole number'],
  }
  workdir = tmp_path / 'run'
  with contextlib.ExitStack() as stack:
    running = {
      case: stack.enter_context(
        subprocess.Popen(
          [sys.executable, ROOT / 'main.py', *args, f'--workdir={workdir}'],
          cwd=tmp_path,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
        )
      )
      for case, args in commands.items()
    }
    ends = {
      case: (*process.communicate(timeout=300), process.returncode)
      for case, process in running.items()
    }
  for case, (stdout, stderr, code) in ends.items():
    assert code == 2, stderr
    assert not stdout
    check_line(stderr, named[case])
  assert not list(tmp_path.iterdir())
