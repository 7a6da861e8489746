"""A ViT through the whole program: weights, AdamW, bfloat16, microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_equal
from vit_weights import save_npz, to_google

from configs import digits
from flatmatch_jax import models
from flatmatch_jax.models import vit
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import loop, program, setup
from flatmatch_jax.types import DatasetInfo


def tiny(name, num_classes, heads=(), dtype='', remat=False):
  """Instead of the networks by name, the smallest of which has 12 blocks."""
  del name
  return vit.VisionTransformer(
    num_classes,
    patch=4,
    size=16,
    depth=2,
    num_heads=2,
    drop_path=0.5,
    heads=heads,
    dtype=jnp.dtype(dtype or 'float32'),
    remat=remat,
  )


@pytest.fixture
def config(tmp_path, monkeypatch):
  monkeypatch.setattr(models, 'create', tiny)
  # Without strong views, which take longest to compile.
  config = digits.get_config('method=pseudo_label+flatmatch')
  config.model, config.optimizer = 'vit_tiny_4', 'adamw'
  config.learning_rate, config.layer_decay = 1e-3, 0.5
  config.steps, config.warmup_steps = 4, 2
  config.dtype, config.remat, config.microbatches = 'bfloat16', True, 2
  config.batch_size = config.unlabeled_batch_size = 16
  config.log_every = config.checkpoint_every = 2
  config.pretrained = str(tmp_path / 'weights.npz')
  model = tiny('', 10)
  variables = model.init(
    jax.random.key(7), jnp.zeros((1, 8, 8, 1)), train=False
  )
  save_npz(config.pretrained, to_google(variables['params']))
  return config


def test_weights_start_the_network_and_its_average(config):
  state = _create(config)
  loaded = setup.start_from(setup.read_weights(config.pretrained, state), state)
  for tree in (loaded.params, loaded.ema_params):
    for name in ('patch', 'block1', 'block2', 'norm', 'cls', 'position'):
      fresh, given = (jax.tree.leaves(x[name]) for x in (state.params, tree))
      if name != 'norm':  # All ones and zeros.
        assert not np.array_equal(fresh[-1], given[-1]), name
  assert_equal(loaded.params, loaded.ema_params)
  assert_equal(loaded.opt_state, state.opt_state)


def _create(config):
  made = program.create(
    config, DatasetInfo(10, 1437, 1437, (1,) * 10), (8, 8, 1)
  )
  return made.init(jax.random.key(0))


def test_run_resumes_exactly(config, tmp_path, stopped_after, capfd):
  whole = loop.train_and_evaluate(config, str(tmp_path / 'whole'))
  assert 'Loaded' in capfd.readouterr().err
  for leaf in jax.tree.leaves((whole.params, whole.opt_state)):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  stopped_after(3, loop.train_and_evaluate, config, str(tmp_path / 'parts'))
  capfd.readouterr()
  parts = loop.train_and_evaluate(config, str(tmp_path / 'parts'))
  # The weights are the checkpoint's, not the file's once more.
  assert 'Loaded' not in capfd.readouterr().err
  raw = lambda state: state.replace(rng=jax.random.key_data(state.rng))
  assert_equal(jax.device_get(raw(whole)), jax.device_get(raw(parts)))
  rows = Workdir(tmp_path / 'whole').metrics()
  assert all(np.isfinite(row['labeled_loss']) for row in rows)
