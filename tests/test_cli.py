"""Wrong input ends in one line before any work; configs hold the paper."""

import contextlib
import importlib
import pathlib
import subprocess
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from flatmatch_jax import cli, program, train
from flatmatch_jax import config as config_lib

ROOT = pathlib.Path(__file__).parent.parent
DATASETS = (
  'digits',
  'cifar10',
  'cifar100',
  'svhn',
  'stl10',
  'imagenet30',
  'imagenet',
)


def file(dataset='digits', arg=''):
  return f'--config={ROOT}/configs/{dataset}.py' + (arg and f':{arg}')


def start(monkeypatch, *args):
  """main.py in this process, up to where the functions would be built."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=values)
  flags.DEFINE_string('workdir', None, '', flag_values=values)
  monkeypatch.setattr(flags, 'FLAGS', values)
  monkeypatch.setattr(sys, 'argv', ['main.py', *args])

  def work(*args):
    raise AssertionError('work has begun')

  monkeypatch.setattr(program, 'create', work)
  with cli.errors_as_lines():
    cli.set_default_config(ROOT / 'configs' / 'digits.py')
    cli.parse_flags(sys.argv)
    train.train_and_evaluate(values.config, values.workdir)


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
WRONG = {
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
  'key': ([file(arg='label=40')], ["'label=40'", *KEYS]),
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
  'split seed': (['--config.split_seed=-1'], ['-1', '[0, 2**32)']),
  'field': (['--config.stepz=5'], ["'stepz'", *FIELDS]),
  'field of a part': (
    ['--config.method_args.treshold=0.9'],
    ["'treshold'", *FIELDS],
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
    ['batch_size=32', '12 parts', 'groups=4', 'microbatches=3'],
  ),
  'microbatches and devices': (
    ['--config.batch_size=8', '--config.microbatches=4'],
    ['batch_size=8', '4 devices times', 'microbatches=4', 'are 16'],
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
    ['--config.batch_size=6'],
    ['batch_size=6', '4 devices', '4 and 8'],
  ),
  'unlabeled batch and devices': (
    ['--config.unlabeled_batch_size=3'],
    ['unlabeled_batch_size=3', '4 devices', 'are 4'],
  ),
  'no number': (['--config.steps=abc'], ['--config.steps=abc']),
  'no whole number': (['--config.steps=1.5'], ['--config.steps=1.5']),
  'labels file': (['--config.labels_file=/none.json'], ['/none.json']),
  'config file': (
    [f'--config={ROOT}/configs/mnist.py'],
    ['configs/mnist.py', *(f'{name}.py' for name in DATASETS)],
  ),
  'flag': (['--worksdir=runs'], ["'worksdir'", 'workdir']),
  'stray argument': (['digits'], ["'digits'", '--config', '--workdir']),
} | {
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
        'log_every',
        'eval_every',
        'checkpoint_every',
        'eval_batch_size',
      ),
      ('0', '-8'),
      'at least 1',
    ),
    (
      ('ema_decay', 'bn_momentum'),
      ('-0.1', '1.0', 'nan', 'inf'),
      'at least 0 and below 1',
    ),
    (('learning_rate',), ('0.0', '-0.1', 'nan', 'inf'), 'positive'),
    (('weight_decay',), ('-0.1', 'nan', 'inf'), 'not be negative'),
    (
      ('recipe_args.rho', 'method_args.fairness_weight', 'method_args.weight'),
      ('-0.1', 'nan', 'inf'),
      'not negative',
    ),
    (('method_args.decay',), ('1.0',), 'below 1'),
    (('pad', 'num_val'), ('-1',), 'negative'),
    (('num_val',), ('1400',), 'choose fewer'),
    (
      ('imbalance', 'unlabeled_imbalance'),
      ('0.0', '-1.0', 'nan', 'inf'),
      'positive and finite',
    ),
    (('microbatches',), ('0', '-2'), 'at least 1'),
    (('microbatches',), ('5',), 'divisible'),
    (('warmup_steps',), ('-1', '400'), 'below config.steps=400'),
    (('layer_decay',), ('0.0', '1.5', 'nan'), 'at most 1'),
    (('layer_decay',), ('0.5',), 'ViT under adamw'),
  )
  for name in names
  for value in values
}


def check_line(stderr, named):
  assert stderr.startswith('error: ')
  assert stderr.count('\n') == 1
  assert stderr.endswith('\n')
  assert 'Traceback' not in stderr
  for words in named:
    assert words in stderr


@pytest.mark.parametrize('case', WRONG)
def test_wrong_input_is_one_line(case, monkeypatch, capfd, tmp_path):
  args, named = WRONG[case]
  workdir = tmp_path / 'run'
  with pytest.raises(SystemExit) as end:
    start(monkeypatch, *args, f'--workdir={workdir}')
  assert end.value.code == 2
  check_line(capfd.readouterr().err, named)
  assert not workdir.exists()


def test_right_input_reaches_the_work(monkeypatch, tmp_path):
  """Or else the test above would prove nothing."""
  with pytest.raises(AssertionError, match='work has begun'):
    start(monkeypatch, '--config.steps=7', f'--workdir={tmp_path / "run"}')


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
    check_line(stderr, WRONG[case][1])
  assert not list(tmp_path.iterdir())


def get_config(dataset, arg=''):
  return importlib.import_module(f'configs.{dataset}').get_config(arg)


NAMED_FIELDS = (
  'batch_norm',
  'checkpoint_every',
  'data_dir',
  'eval_every',
  'labels',
  'log_every',
  'method',
  'seed',
  'split_seed',
  'steps',
)


@pytest.mark.parametrize('dataset', DATASETS)
@pytest.mark.parametrize(
  'method', [*METHODS, 'fixmatch+flatmatch', 'fixmatch+flatmatch_e']
)
def test_every_config_is_sound(dataset, method):
  config = get_config(dataset, f'method={method}')
  config_lib.check(config)
  assert set(NAMED_FIELDS) <= set(config)
  assert config.dataset == dataset
  assert config.method == method


@pytest.mark.parametrize('dataset', DATASETS)
def test_config_file_shows_its_command(dataset):
  doc = importlib.import_module(f'configs.{dataset}').__doc__
  assert 'python main.py' in doc
  assert dataset == 'digits' or f'configs/{dataset}.py' in doc


@pytest.mark.parametrize(
  ('dataset', 'model', 'weight_decay', 'labels'),
  [
    ('cifar10', 'wrn_28_2', 5e-4, 40),
    ('cifar100', 'wrn_28_8', 1e-3, 400),
    ('svhn', 'wrn_28_2', 5e-4, 40),
    ('stl10', 'wrn_37_2', 5e-4, 40),
  ],
)
def test_configs_hold_the_papers_numbers(dataset, model, weight_decay, labels):
  config = get_config(dataset, 'method=flatmatch_e')
  assert config.model == model
  assert config.weight_decay == weight_decay
  assert config.labels == labels
  assert config.steps == 2**20
  assert config.batch_size == 64
  assert config.unlabeled_batch_size == 448
  assert config.learning_rate == 0.03
  assert config.ema_decay == 0.999
  assert config.bn_momentum == 0.999
  assert config.recipe_args.rho == 0.05
  assert config.recipe_args.decay == 0.999
  assert config.method_args.decay == 0.999
  assert get_config(dataset, 'method=flatmatch').recipe_args.rho == 0.05
  fixmatch = get_config(dataset, 'method=fixmatch').method_args
  assert fixmatch.threshold == 0.95


@pytest.mark.parametrize(
  ('dataset', 'labels', 'weight'),
  [
    ('cifar10', 10, 0.01),
    ('cifar10', 40, 0.05),
    ('cifar10', 250, 0.05),
    ('cifar10', 4000, 0.05),
    ('cifar100', 400, 0.01),
    ('cifar100', 2500, 0.05),
    ('cifar100', 10000, 0.05),
    ('svhn', 40, 0.01),
    ('svhn', 250, 0.01),
    ('svhn', 1000, 0.01),
    ('stl10', 40, 0.01),
    ('stl10', 250, 0.05),
    ('stl10', 1000, 0.05),
  ],
)
@pytest.mark.parametrize('method', ['freematch', 'flatmatch', 'flatmatch_e'])
def test_fairness_weight_of_freematch(dataset, labels, weight, method):
  config = get_config(dataset, f'method={method},labels={labels}')
  assert config.method_args.fairness_weight == weight
  assert labels in config.paper_labels
  config_lib.check(config)


def test_digits_are_small_and_forget_faster():
  config = get_config('digits')
  assert config.method == 'flatmatch'
  assert config.labels == 40
  assert config.steps < 2000
  assert not config.flip
  assert config.bn_momentum < 0.999
  assert config.method_args.decay < 0.999
  assert get_config('digits', 'method=flatmatch_e').recipe_args.decay < 0.999


def test_variant_is_read_from_the_argument():
  config = get_config('cifar10', 'method=flatmatch_e,labels=250,seed=1')
  assert (config.method, config.labels, config.seed) == ('flatmatch_e', 250, 1)
  config = get_config('cifar10', 'method=supervised,labels=all,split_seed=3')
  assert (config.labels, config.split_seed) == ('all', 3)
  config_lib.check(config)


_IMPORT_ALL = """
import importlib, pkgutil, sys
import flatmatch_jax
names = [m.name for m in pkgutil.walk_packages(
    flatmatch_jax.__path__, 'flatmatch_jax.')]
assert 'flatmatch_jax.train' in names, names
for name in names:
  importlib.import_module(name)
slow = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'clu', 'tensorboard'}
print(len(names), sorted(slow & set(sys.modules)))
"""


def test_importing_the_package_loads_no_tensorflow():
  done = subprocess.run(
    [sys.executable, '-c', _IMPORT_ALL],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  number, loaded = done.stdout.split(maxsplit=1)
  assert int(number) > 20
  assert loaded.strip() == '[]'
