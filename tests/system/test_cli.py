"""Configs hold the paper, and the package imports what it needs."""

import importlib
import subprocess
import sys

import pytest
from runs import ROOT

from flatmatch_jax.training import config as config_lib

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
import absl.logging, flatmatch_jax
before = absl.logging.get_verbosity(), sys.unraisablehook
names = [m.name for m in pkgutil.walk_packages(
    flatmatch_jax.__path__, 'flatmatch_jax.')]
assert 'flatmatch_jax.training.loop' in names, names
for name in names:
  importlib.import_module(name)
slow = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'clu', 'tensorboard'}
print(len(names), sorted(slow & set(sys.modules)))
print(before == (absl.logging.get_verbosity(), sys.unraisablehook))
"""


def test_importing_loads_no_tensorflow_and_silences_nothing():
  done = subprocess.run(
    [sys.executable, '-c', _IMPORT_ALL],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  loaded, unchanged = done.stdout.splitlines()
  number, loaded = loaded.split(maxsplit=1)
  assert int(number) > 20
  assert loaded == '[]'
  assert unchanged == 'True'
