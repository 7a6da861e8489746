"""Configs: the paper's numbers, and what a machine or a file changes."""

import importlib
import importlib.metadata
import importlib.util

import pytest

from configs import cifar10_fast, cifar10_t4, folder, npz, tfds
from flatmatch_jax.system import startup
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.types import UserError

DATASETS = [
  'digits',
  'cifar10',
  'cifar100',
  'svhn',
  'stl10',
  'imagenet30',
  'imagenet',
]
METHODS = [
  'supervised',
  'fixmatch',
  'freematch',
  'flatmatch',
  'flatmatch_e',
  'fixmatch+flatmatch',
]


def get_config(dataset, arg=''):
  return importlib.import_module(f'configs.{dataset}').get_config(arg)


@pytest.mark.parametrize('dataset', DATASETS)
def test_every_config_is_sound_and_shows_its_command(dataset):
  for method in METHODS:
    config = get_config(dataset, f'method={method}')
    config_lib.check(config)
    assert (config.dataset, config.method) == (dataset, method)
  doc = importlib.import_module(f'configs.{dataset}').__doc__
  assert 'python main.py' in doc
  assert dataset == 'digits' or f'configs/{dataset}.py' in doc


@pytest.mark.parametrize(
  ('dataset', 'model', 'weight_decay', 'fairness'),
  [
    ('cifar10', 'wrn_28_2', 5e-4, {10: 0.01, 40: 0.05, 250: 0.05, 4000: 0.05}),
    ('cifar100', 'wrn_28_8', 1e-3, {400: 0.01, 2500: 0.05, 10000: 0.05}),
    ('svhn', 'wrn_28_2', 5e-4, {40: 0.01, 250: 0.01, 1000: 0.01}),
    ('stl10', 'wrn_37_2', 5e-4, {40: 0.01, 250: 0.05, 1000: 0.05}),
  ],
)
def test_configs_hold_the_papers_numbers(
  dataset, model, weight_decay, fairness
):
  for labels, weight in fairness.items():
    config = get_config(dataset, f'method=flatmatch_e,labels={labels}')
    config_lib.check(config)
    assert labels in config.paper_labels
    assert config.method_args.fairness_weight == weight
    assert (config.model, config.weight_decay) == (model, weight_decay)
    assert (config.steps, config.learning_rate) == (2**20, 0.03)
    assert (config.batch_size, config.unlabeled_batch_size) == (64, 448)


def test_variant_is_read_from_the_argument():
  config = get_config('cifar10', 'method=flatmatch_e,labels=250,seed=1')
  assert (config.method, config.labels, config.seed) == ('flatmatch_e', 250, 1)
  config = get_config('cifar10', 'method=supervised,labels=all,split_seed=3')
  assert (config.labels, config.split_seed) == ('all', 3)
  config_lib.check(config)


@pytest.mark.parametrize('file', [folder, npz, tfds])
@pytest.mark.parametrize('accelerator', [False, True])
def test_own_images_are_fast_without_an_accelerator(
  file, accelerator, monkeypatch
):
  monkeypatch.setattr(startup, 'has_accelerator', lambda: accelerator)
  assert ('fast' in file.get_config().model) != accelerator
  assert 'fast' in file.get_config('fast=true').model
  assert 'wrn' in file.get_config('fast=false').model


@pytest.mark.parametrize('accelerator', [False, True])
def test_a_named_network_starts_from_weights(
  accelerator, monkeypatch, tmp_path
):
  monkeypatch.setattr(startup, 'has_accelerator', lambda: accelerator)
  config = folder.get_config('model=resnet_18,image_size=128')
  config.data_dir = str(tmp_path)
  with pytest.raises(UserError, match=r'layer_decay=0\.5 .*config\.pretrained'):
    config_lib.check(config)
  (tmp_path / 'weights').touch()
  config.pretrained = str(tmp_path / 'weights')
  config_lib.check(config)
  assert (config.model, config.optimizer) == ('resnet_18', 'adamw')
  assert (config.steps, config.warmup_steps, config.pad) == (2_000, 100, 16)


@pytest.mark.parametrize(
  ('platforms', 'expected'), [('cpu', False), ('cuda,cpu', True), ('tpu', True)]
)
def test_jax_platforms_decides_about_accelerators(
  platforms, expected, monkeypatch
):
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  assert startup.has_accelerator() == expected


def test_device_files_show_an_accelerator(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setattr(startup, '_ACCELERATORS', (f'{tmp_path}/nvidia[0-9]*',))
  plugins: list[str] = ['cuda']
  monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: plugins)
  assert not startup.has_accelerator()
  (tmp_path / 'nvidiactl').touch()
  assert not startup.has_accelerator()
  (tmp_path / 'nvidia0').touch()
  assert startup.has_accelerator()
  plugins.clear()  # A GPU, but a jax for CPUs.
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert not startup.has_accelerator()


@pytest.mark.parametrize('labels', [40, 250, 4000, 'all'])
@pytest.mark.parametrize('method', ['supervised', 'fixmatch', 'flatmatch_e'])
def test_fast_config_is_sound(method, labels):
  config = cifar10_fast.get_config(f'method={method},labels={labels}')
  config_lib.check_fields(config)
  many = labels in (4000, 'all')
  expected = (32, 16_000) if many else (16, 8_000)
  assert (config.batch_size, config.steps) == expected


@pytest.mark.parametrize(
  ('method', 'unlabeled'), [('flatmatch', 224), ('mixmatch', 32)]
)
def test_config_for_a_small_gpu_keeps_the_ratio_of_batches(method, unlabeled):
  config = cifar10_t4.get_config(f'method={method}')
  config_lib.check_fields(config)
  assert (config.batch_size, config.unlabeled_batch_size) == (32, unlabeled)
  assert config.warmup_steps == 500  # Follows the steps of this file.


@pytest.mark.parametrize(
  ('file', 'arg', 'changes', 'line'),
  [
    (folder, 'fast=yes', {}, r'fast=yes .* true, false, auto'),
    (folder, 'fast=true,model=resnet_18', {}, 'leave one of them out'),
    (folder, 'model=wrn_28_2', {}, r'such as resnet_18 .*--config\.model=wrn'),
    # After its numbers were chosen.
    (folder, 'fast=true', {'data_dir': 'here', 'fast': 'false'}, 'fast'),
    (cifar10_fast, '', {'model': 'wrn_28_2'}, 'muon is not for wrn_28_2'),
    (cifar10_fast, '', {'schedule': 'linaer'}, "Did you mean 'linear'"),
  ],
)
def test_what_does_not_go_together_is_refused(file, arg, changes, line):
  def check():
    config = file.get_config(arg)
    config.update(changes)
    config_lib.check_fields(config)

  with pytest.raises(UserError, match=line):
    check()
