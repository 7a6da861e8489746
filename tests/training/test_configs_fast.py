"""The fast settings: chosen without an accelerator, whatever the images."""

import importlib.metadata
import importlib.util

import pytest

from configs import cifar10_fast, cifar10_t4, folder, npz, tfds
from flatmatch_jax.system import startup
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.types import UserError


@pytest.mark.parametrize('file', [folder, npz, tfds])
@pytest.mark.parametrize('accelerator', [False, True])
def test_own_images_are_fast_without_an_accelerator(
  file, accelerator, monkeypatch
):
  monkeypatch.setattr(startup, 'has_accelerator', lambda: accelerator)
  assert ('fast' in file.get_config().model) != accelerator
  assert 'fast' in file.get_config('fast=true').model
  assert 'wrn' in file.get_config('fast=false').model


def test_fast_is_one_of_three_words():
  with pytest.raises(UserError, match=r'fast=yes .* true, false, auto'):
    folder.get_config('fast=yes')


def test_fast_cannot_be_changed_after_its_numbers_were_chosen():
  config = folder.get_config('fast=true')
  config.data_dir, config.fast = 'here', 'false'
  with pytest.raises(UserError, match='fast'):
    config_lib.check_fields(config)


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
  assert config.batch_size == (32 if many else 16)


@pytest.mark.parametrize(
  ('method', 'unlabeled'), [('flatmatch', 224), ('mixmatch', 32)]
)
def test_config_for_a_small_gpu_keeps_the_ratio_of_batches(method, unlabeled):
  config = cifar10_t4.get_config(f'method={method}')
  config_lib.check_fields(config)
  assert (config.batch_size, config.unlabeled_batch_size) == (32, unlabeled)
  assert config.warmup_steps == 500  # Follows the steps of this file.


def test_muon_is_refused_where_kernels_are_not_normalized():
  config = cifar10_fast.get_config()
  config.model = 'wrn_28_2'
  with pytest.raises(UserError, match=r'muon is not for wrn_28_2'):
    config_lib.check_fields(config)


def test_unknown_schedule_is_refused():
  config = cifar10_fast.get_config()
  config.schedule = 'linaer'
  with pytest.raises(UserError, match=r"Did you mean 'linear'"):
    config_lib.check_fields(config)
