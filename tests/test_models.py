"""The networks have the published sizes, and any image fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import models
from flatmatch_jax.types import UserError


def shapes(name, classes, shape, **kwargs):
  model = models.create(name, classes, **kwargs)
  images = jnp.zeros((1, *shape))
  init = lambda: model.init(jax.random.key(0), images, train=True)
  return model, jax.eval_shape(init)


@pytest.mark.parametrize(
  ('name', 'classes', 'size', 'number'),
  [
    ('wrn_28_2', 10, 32, 1_469_642),
    ('wrn_28_2', 100, 32, 1_481_252),
    ('wrn_28_8', 100, 32, 23_409_092),
    ('wrn_37_2', 10, 96, 5_933_770),
  ],
)
def test_parameter_counts(name, classes, size, number):
  _, variables = shapes(name, classes, (size, size, 3))
  assert sum(x.size for x in jax.tree.leaves(variables['params'])) == number


def test_heads_add_four_times_features_plus_four():
  _, plain = shapes('wrn_28_2', 10, (32, 32, 3))
  _, more = shapes('wrn_28_2', 10, (32, 32, 3), heads=(('rotation', 4),))
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree['params']))
  assert count(more) - count(plain) == 4 * 128 + 4


@pytest.mark.parametrize('shape', [(8, 8, 1), (32, 32, 3), (37, 50, 4)])
def test_any_image_size_and_channel_count(shape):
  model, variables = shapes('wrn_10_1', 7, shape)
  prediction = jax.eval_shape(
    lambda v, x: model.apply(v, x, train=False),
    variables,
    jnp.zeros((5, *shape)),
  )
  assert prediction.logits.shape == (5, 7)
  assert prediction.features.shape == (5, 64)


@pytest.mark.parametrize('name', ['wrn_11_2', 'wrn_4_1', 'wrn_28_0', 'resnet'])
def test_unknown_model_lists_what_is_known(name):
  with pytest.raises(UserError, match='wrn_28_2'):
    models.create(name, 10)


def test_network_equals_its_definition_written_out():
  """One block a stage, with numpy's patience and lax's convolution."""
  model = models.create('wrn_10_1', 3)
  rng = jax.random.key(1)
  x = jax.random.normal(rng, (2, 8, 8, 1))
  variables = jax.jit(lambda: model.init(rng, x, train=True))()
  params, stats = variables['params'], variables['batch_stats']

  def conv(x, p, stride=1):
    pad = p['kernel'].shape[0] // 2
    y = jax.lax.conv_general_dilated(
      x,
      p['kernel'],
      (stride, stride),
      ((pad, pad), (pad, pad)),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    return y + p['bias']

  def norm_act(x, p, s):
    y = (x - s['mean']) / jnp.sqrt(s['var'] + 1e-3) * p['scale'] + p['bias']
    return jnp.where(y > 0, y, 0.1 * y)

  y = conv(x, params['stem'])
  for stage, stride in ((1, 1), (2, 2), (3, 2)):
    p, s = params[f'stage{stage}_block1'], stats[f'stage{stage}_block1']
    if stage == 1:  # Elsewhere the first norm is dead, as in the port.
      y = norm_act(y, p['norm1'], s['norm1'])
    h = conv(y, p['conv1'], stride)
    h = conv(norm_act(h, p['norm2'], s['norm2']), p['conv2'])
    y = h + (conv(y, p['shortcut'], stride) if 'shortcut' in p else y)
  y = norm_act(y, params['norm'], stats['norm']).mean((1, 2))
  logits = y @ params['classifier']['kernel'] + params['classifier']['bias']
  got = model.apply(variables, x, train=False)
  np.testing.assert_allclose(got.logits, logits, rtol=1e-4, atol=1e-5)


def test_training_moves_running_statistics_by_the_momentum():
  model = models.create('wrn_10_1', 3, bn_momentum=0.75)
  rng = jax.random.key(1)
  x = jax.random.normal(rng, (4, 8, 8, 1))
  variables = jax.jit(lambda: model.init(rng, x, train=True))()
  _, updates = model.apply(variables, x, train=True, mutable=['batch_stats'])
  stem = (
    jax.lax.conv_general_dilated(
      x,
      variables['params']['stem']['kernel'],
      (1, 1),
      ((1, 1), (1, 1)),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    + variables['params']['stem']['bias']
  )
  moved = updates['batch_stats']['stage1_block1']['norm1']
  np.testing.assert_allclose(
    moved['mean'], 0.25 * stem.mean((0, 1, 2)), rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(
    moved['var'], 0.75 + 0.25 * stem.var((0, 1, 2)), rtol=1e-4
  )
  assert jax.tree.structure(updates['batch_stats']) == jax.tree.structure(
    variables['batch_stats']
  )
