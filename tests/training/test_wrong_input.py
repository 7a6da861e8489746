"""Wrong input ends in one line before any work, and changes nothing."""

import contextlib
import importlib
import re
import shlex
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


WORDS = {
  'METHODS': 'supervised; fixmatch; freematch; flatmatch; flatmatch_e',
  'FIELDS': 'batch_norm; checkpoint_every; data_dir; eval_every; log_every; '
  'method_args.fairness_weight; recipe_args.rho; seed; split_seed; steps',
  'MODELS': 'wrn_DEPTH_WIDTH; wrn_28_2; wrn_37_2',
  'PAPER_LABELS': '40; 100; 400',
  'KEYS': 'method; labels; seed; split_seed',
  'DATASETS': '; '.join(DATASETS),
  'FILES': '; '.join(f'{name}.py' for name in DATASETS),
  'HERE': __file__,
  'ROOT': str(ROOT),
  'LONG': 'x' * 5000,
}

# A config file with its argument, fields of it, and what the line must name:
# the wrong value and what is known.
TABLE = """
digits:method=fixmach | 'fixmach'; METHODS
digits:method= | ''; METHODS
digits:method=fixmatch+flat | 'fixmatch+flat'; METHODS
digits:method=+flatmatch | METHODS
digits:method=supervised+flatmatch |\
  'supervised+flatmatch'; no meaning; supervised
digits:method=supervised+flatmatch_e |\
  'supervised+flatmatch_e'; no meaning; supervised
dataset=mnist | 'mnist'; DATASETS
digits:lables=40 | 'lables=40'; KEYS
digits:seed=1,labels | 'labels'; KEYS
digits:labels=41 | 41; 10 classes; such as 40 or 50; PAPER_LABELS
digits:labels=0 | labels=0; PAPER_LABELS
digits:labels=-10 | labels=-10; such as 10, or all; PAPER_LABELS
digits:labels=abc | labels=abc; whole number
digits:labels=100000 | 100000; fewer
cifar100:labels=40 | labels=40; 100 classes; 400; 2500; 10000
digits:seed=1.5 | seed=1.5; whole number
stepz=5 | 'stepz'; FIELDS
method_args.treshold=0.9 | 'method_args.treshold'; FIELDS
steps.first=5 | steps.first
model=resnet50 | 'resnet50'; MODELS
model=wrn_11_2 | 'wrn_11_2'; MODELS
model=wrn_28_0 | 'wrn_28_0'; MODELS
model=wrn_37_0 | 'wrn_37_0'; MODELS
optimizer=adam | 'adam'; sgd, adamw
pretrained=weights.npz | 'weights.npz'; for a ViT or a ResNet
model=vit_tiny_2 pretrained=weights.npz | 'weights.npz'; not a file
digits:method=mpl model=vit_tiny_2 pretrained=weights.npz | 'weights.npz'; mpl
model=vit_tiny_2 recipe_args.groups=2 | groups=2; vit_tiny_2
recipe_args.groups=4 microbatches=3 |\
  batch_size=32; by 96:; 4 of config.recipe_args.groups; microbatches=3; are 96
cpu_devices=2 microbatches=2 | cpu_devices=2; microbatches=2; for ever; at 0
cpu_devices=2 recipe_args.groups=2 | cpu_devices=2; recipe_args.groups=2
batch_size=40 microbatches=4 |\
  batch_size=40; 8 devices; microbatches=4; 32 and 64
digits:method=flatmatch_fix recipe_args.pretrain_steps=400 |\
  pretrain_steps=400; steps=400; 40 are fewer than the 100
dtype=float64 | 'float64'; float32, bfloat16, float16
imagenet:model=vit_base_15 | vit_base_15; patches of 15; image_size=224
digits:labels=all imbalance=10 | imbalance=10; labels=all
labels_file=mine.json imbalance=10 | imbalance=10; mine.json
batch_norm=both | 'both'; joint; clean_strong; split
method=fixmatch | 'fixmatch'; 'flatmatch'; FILE.py:method=fixmatch
labels=100 | 100; 40; FILE.py:labels=100
batch_size=12 | batch_size=12; 8 devices; 8 and 16
unlabeled_batch_size=3 | unlabeled_batch_size=3; 8 devices; are 8
mesh.fsdp=3 | mesh.fsdp=3; devices, 8; 1, 2, 4, 8
mesh.fsdp=0 | mesh.fsdp=0
steps=abc | --config.steps=abc
steps=1.5 | --config.steps=1.5
labels_file=/none.json | /none.json
mnist | configs/mnist.py; FILES
--worksdir=runs | 'worksdir'; workdir
digits:labels=1_0 | labels=1_0; not a whole number
digits:method=flatmach | 'flatmach'; Did you mean 'flatmatch'?
dataset=digit | 'digit'; Did you mean 'digits'?
digits:label=40 | Did you mean 'labels'?
lok_every=5 | Did you mean 'log_every'?
recipe_args.roh=0.1 | Did you mean 'recipe_args.rho'?
--workdirr=x | Did you mean: workdir
--steps=100 | no flag --steps; write --config.steps=100.
--steps | no flag --steps; write --config.steps=VALUE.
--rho=0.3 | no flag --rho; write --config.recipe_args.rho=0.3.
--recipe_args.rho=0.3 | write --config.recipe_args.rho=0.3.
--labels=100 | no flag --labels; write --config FILE.py:labels=100.
--batchsize=8 | 'batchsize'; Did you mean 'config.batch_size'?
= | ''; FIELD=VALUE
--config= | no config file
--config=ROOT/configs | no config file
steps | --config.steps; whole number
method_args=3 | method_args=3; one by one
labels=all | labels=all; FILE.py:labels=all
model=wrn_1000000_2 | up to 1000; MODELS
model=wrn_28_1000000 | up to 100; MODELS
model=wrn_٢٨_2 | MODELS
model=wrn_100_100 | wrn_100_100; GiB; smaller config.model
batch_size=1000000000 | GiB; of memory; config.batch_size
unlabeled_batch_size=1000000000 | GiB; of memory; config.unlabeled_batch_size
eval_batch_size=2000000000 | GiB; of memory; config.eval_batch_size
digits model=vit_tiny_3 | 8; 3
mean=abc | config.mean='abc'; a number
mean=(nan,) | config.mean=; a number
mean=(127.5,) | config.mean=127.5; as pixels are
std=(0.0,) | config.std=0; above 0
'mean=(0.1, 0.2)' | 2 numbers; 1 channels
mean=() | 0 numbers; 1 channels
method_args.min_threshold=0.9 method_args.max_threshold=0.8 |\
  min_threshold=0.9; max_threshold=0.8
digits:method=uda method_args.tsa=quick | 'quick'; linear
pad=8 | config.pad=8; below the 8 pixels
model=vit_tiny_2 pretrained=/tmp | '/tmp'; not a file
model=vit_tiny_2 pretrained=HERE | HERE; .safetensors
folder:image_size=1000000 data_dir=/tmp | image_size=1000000; from 8 to 1024
folder:image_size=0 data_dir=/tmp | image_size=0; from 8 to 1024
tfds:name=huggingface:mnist | 'huggingface:mnist'; run code of others
tfds:name=../mnist | '../mnist'; name/config
tfds | name=mnist
folder | data_dir is empty; PATH
folder data_dir=/none | /none; not a folder
folder data_dir=HERE | HERE; not a folder
folder data_dir=ROOT/configs | configs; labeled/CLASS
npz data_dir=ROOT | ROOT; There is no file
npz data_dir=HERE | HERE; zip
compilation_cache=HERE | compilation_cache=HERE; a folder; leave it empty
compilation_cache=/proc/none |\
  compilation_cache=/proc/none; a folder; leave it empty
labels_file=LONG | name too long
digits:method=fixmatch,labels=all unlabeled_includes_labeled=false |\
    unlabeled_includes_labeled
"""


def replaced(text):
  return re.sub('[A-Z_]{4,}', lambda m: WORDS.get(m[0], m[0]), text)


def argument(text):
  if text.startswith('-'):
    return text
  name, _, arg = text.partition(':')
  if (ROOT / 'configs' / f'{name}.py').exists() or name == 'mnist':
    return file(name, arg)
  return f'--config.{text}'


def read_table():
  for row in TABLE.strip().splitlines():
    args, named = row.split('|')
    given = [replaced(argument(arg)) for arg in shlex.split(args)]
    yield args.strip(), (given, replaced(named.strip()).split('; '))


COUNTS = (
  'steps batch_size unlabeled_batch_size microbatches log_every eval_every '
  'checkpoint_every eval_batch_size'
)
# Not of the type of the field, or out of its bounds.
BOUNDS = (
  ('steps', 'nan text true 1,2  1e3', 'whole number'),
  ('seed', 'nan text 0.5', 'whole number'),
  ('learning_rate', 'text true 1,2 ', 'not a number'),
  ('recipe_args.rho', 'text ', 'not a number'),
  ('flip', '2 text nan', 'neither true nor false'),
  (
    COUNTS,
    f'0 -8 1000000000000 1{"0" * 30}',
    'a whole number, at least 1 and at most 2147483647',
  ),
  (
    'pad num_val max_skipped probe_every profile_steps warmup_steps',
    '-1 1000000000000',
    'a whole number, at least 0',
  ),
  ('seed split_seed', f'-1 {2**64}', 'at most 4294967295'),
  (
    'ema_decay bn_momentum method_args.decay',
    '-0.1 1.0 nan inf',
    'at least 0 and below 1',
  ),
  (
    'learning_rate imbalance unlabeled_imbalance',
    '0.0 -0.1 nan inf 1e+30',
    'a number, above 0 and at most',
  ),
  (
    'weight_decay recipe_args.rho method_args.fairness_weight '
    'method_args.weight',
    '-0.1 nan inf 1e+30',
    'a number, at least 0 and at most',
  ),
  ('num_val', '1400', 'choose fewer'),
  ('microbatches', '5', 'divisible'),
  ('warmup_steps', '400', 'below config.steps=400'),
  ('layer_decay', '0.0 1.5 nan', 'above 0 and at most 1'),
  ('layer_decay', '0.5', 'ResNet under adamw'),
)
WRONG = dict(read_table()) | {
  f'{name}={value}': ([f'--config.{name}={value}'], [f'{name}={value}', rule])
  for names, values, rule in BOUNDS
  for name in names.split()
  for value in values.split(' ')
}
WRONG['stray argument'] = ['digits'], ["'digits'", '--config', '--workdir']


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
    'digits:method=fixmach': [file(arg='method=fixmach')],
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
