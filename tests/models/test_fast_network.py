"""The fast networks: their definition, any image, and convolutions in parts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import models
from flatmatch_jax.models import fast
from flatmatch_jax.types import UserError


def shapes(name, shape, classes=10):
  model = models.create(name, classes)
  images = jnp.zeros((2, *shape))
  init = lambda: model.init(jax.random.key(0), images, train=True)
  variables = jax.eval_shape(init)
  prediction = jax.eval_shape(
    lambda v, x: model.apply(v, x, train=False), variables, images
  )
  return variables, prediction


def test_number_of_parameters():
  variables, _ = shapes('fast_32_64_128', (32, 32, 3))
  sizes = [x.size for x in jax.tree.leaves(variables['params'])]
  assert sum(sizes) == 289_418


@pytest.mark.parametrize(
  ('shape', 'halvings'),
  [
    ((8, 8, 1), 0),
    ((16, 16, 3), 0),
    ((28, 28, 1), 1),
    ((32, 32, 3), 1),
    ((37, 50, 3), 1),
    ((64, 64, 3), 2),
    ((96, 96, 3), 3),
    ((224, 224, 3), 4),
  ],
)
def test_the_stem_halves_any_image_to_about_sixteen_pixels(shape, halvings):
  variables, prediction = shapes('fast_8_16_32_64', shape, classes=7)
  assert prediction.logits.shape == (2, 7)
  assert prediction.features.shape == (2, 64)
  names = [name for name in variables['params'] if 'halving' in name]
  assert fast.halvings(min(shape[:2])) == halvings
  assert len(names) == max(halvings - 1, 0)


def test_cost_hardly_grows_with_the_image():
  model = models.create('fast_32_64_128', 10)

  def flops(side):
    images = jnp.zeros((1, side, side, 3))
    init = lambda: model.init(jax.random.key(0), images, train=True)
    run = jax.jit(lambda v, x: model.apply(v, x, train=False).logits)
    compiled = run.lower(jax.eval_shape(init), images).compile()
    return compiled.cost_analysis()['flops']

  usual = flops(32)
  assert flops(64) < 1.25 * usual
  assert flops(224) < 2 * usual


@pytest.mark.parametrize('name', ['fast', 'fast_0', 'fast_5000', 'fast_8_x'])
def test_wrong_widths_are_refused(name):
  with pytest.raises(UserError, match='fast_32_64_128'):
    models.create(name, 10)


def test_max_pool_is_that_of_flax_with_its_gradient():
  x = jnp.asarray(np.random.RandomState(0).randn(2, 7, 6, 3), jnp.float32)
  theirs = lambda x: nn.max_pool(x, (2, 2), (2, 2))
  loss = lambda pool: jax.value_and_grad(lambda x: (pool(x) ** 2).sum())
  for ours, expected in zip(
    loss(fast.max_pool)(x), loss(theirs)(x), strict=True
  ):
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_parts_give_what_the_whole_gives(monkeypatch):
  monkeypatch.setattr(fast, '_PART', 4)
  monkeypatch.setattr(jax, 'device_count', lambda: 1)
  rng = np.random.RandomState(0)
  x = jnp.asarray(rng.randn(12, 6, 6, 3), jnp.float32)
  kernel = jnp.asarray(rng.randn(3, 3, 3, 5), jnp.float32)
  options = {
    'window_strides': (1, 1),
    'padding': 'SAME',
    'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'),
  }

  def loss(conv):
    return jax.value_and_grad(
      lambda x, k: (conv(x, k, **options) ** 3).sum(), argnums=(0, 1)
    )

  text = jax.jit(loss(fast.conv_in_parts)).lower(x, kernel).as_text()
  assert text.count('stablehlo.convolution') == 9  # Three parts, three passes.
  ours = jax.tree.leaves(loss(fast.conv_in_parts)(x, kernel))
  whole = jax.tree.leaves(loss(jax.lax.conv_general_dilated)(x, kernel))
  for a, b in zip(ours, whole, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_network_equals_its_definition_written_out():
  model = models.create('fast_4_6', 3)
  rng = np.random.RandomState(0)
  x = rng.randn(4, 32, 32, 3).astype(np.float32)
  init = lambda: model.init(jax.random.key(0), x, train=True)
  variables = jax.tree.map(
    lambda v: (
      (0.5 + rng.rand(*v.shape)).astype(np.float32)
      * rng.choice([-1, 1] if v.ndim > 1 else [1], v.shape).astype(np.float32)
    ),
    jax.eval_shape(init),
  )
  params, stats = variables['params'], variables['batch_stats']

  def layer(x, name, stride=1):
    p, s = params[name], stats[name]['norm']
    y = jax.lax.conv_general_dilated(
      x,
      p['conv']['kernel'],
      (stride, stride),
      ((1, 1), (1, 1)),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    y = (y - s['mean']) / jnp.sqrt(s['var'] + 1e-5)
    y = y * p['norm']['scale'] + p['norm']['bias']
    return jnp.where(y > 0, y, 0.1 * y)

  y = layer(x, 'stem', stride=2)
  y = y + layer(y, 'stage1')
  y = y.reshape(4, 8, 2, 8, 2, 4).max((2, 4))
  y = layer(y, 'stage2_widen')
  y = y + layer(y, 'stage2')
  y = y.max((1, 2))
  logits = y @ params['classifier']['kernel'] + params['classifier']['bias']
  got = jax.jit(lambda v: model.apply(v, x, train=False))(variables)
  np.testing.assert_allclose(got.logits, logits, rtol=1e-4, atol=1e-4)
