"""The optimizer follows its recursion, and decays kernels only."""

import math

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flatmatch_jax.models.vit import VisionTransformer
from flatmatch_jax.step import optimizer
from flatmatch_jax.types import Head, UserError


@pytest.mark.parametrize(
  ('part', 'factor'), [(0.0, 1.0), (0.5, 0.77301), (1.0, 0.19509)]
)
def test_cosine_falls_to_a_fifth(part, factor):
  schedule = optimizer.cosine_schedule(0.03, 2**20)
  value = float(schedule(part * 2**20)) / 0.03
  assert value == pytest.approx(factor, abs=5e-6)


def test_linear_schedule_warms_up_and_falls_to_a_twentieth():
  schedule = optimizer.linear_schedule(0.2, 110, warmup_steps=10)
  values = [float(schedule(step)) / 0.2 for step in (0, 5, 10, 60, 110)]
  assert values == pytest.approx([0, 0.5, 1, 0.525, 0.05])


def test_nesterov_and_decay_follow_the_recursion():
  rng = np.random.RandomState(0)
  kernel, bias = rng.randn(3, 2), rng.randn(2)
  params = {'kernel': jnp.asarray(kernel), 'bias': jnp.asarray(bias)}
  tx = optimizer.sgd(optimizer.cosine_schedule(0.1, 10), weight_decay=0.01)
  state = tx.init(params)
  velocity = [np.zeros((3, 2)), np.zeros(2)]
  for step in range(5):
    gradients = [rng.randn(3, 2), rng.randn(2)]
    updates, state = tx.update(
      dict(zip(('kernel', 'bias'), map(jnp.asarray, gradients), strict=True)),
      state,
      params,
    )
    params = optax.apply_updates(params, updates)
    rate = 0.1 * math.cos(7 * math.pi / 16 * step / 10)
    gradients[0] = gradients[0] + 0.01 * kernel  # Not the bias.
    velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
    kernel = kernel - rate * (gradients[0] + 0.9 * velocity[0])
    bias = bias - rate * (gradients[1] + 0.9 * velocity[1])
    np.testing.assert_allclose(params['kernel'], kernel, rtol=1e-5)
    np.testing.assert_allclose(params['bias'], bias, rtol=1e-5)


def test_warm_up_is_a_line_and_the_cosine_takes_the_rest():
  schedule = optimizer.cosine_schedule(0.1, 30, warmup_steps=10)
  at = lambda step: float(jax.jit(schedule)(step)) / 0.1
  assert [at(step) for step in (0, 1, 5, 9)] == pytest.approx(
    [0, 0.1, 0.5, 0.9]
  )
  assert at(10) == pytest.approx(1)
  assert at(20) == pytest.approx(0.77301, abs=5e-6)
  assert at(30) == pytest.approx(0.19509, abs=5e-6)


def tiny_vit(depth):
  """Random parameters of a tiny ViT with an extra head."""
  rng = np.random.RandomState(0)
  model = VisionTransformer(
    3, patch=4, size=4, depth=depth, num_heads=2, heads=(Head('rotation', 4),)
  )
  x = jnp.zeros((1, 4, 4, 1))
  init = lambda: model.init(jax.random.key(0), x, train=True)
  return jax.tree.map(
    lambda p: rng.randn(*p.shape).astype(np.float32),
    jax.eval_shape(init)['params'],
  )


def test_adamw_follows_the_recursion():
  rng = np.random.RandomState(0)
  shapes = {
    'cls': (1, 1, 2),
    'position': (1, 3, 2),
    'patch/kernel': (1, 1, 1, 2),
    'norm/scale': (2,),
    'classifier/kernel': (2, 3),
    'classifier/bias': (3,),
  }
  decayed = {'patch/kernel', 'classifier/kernel'}
  values = {name: rng.randn(*shape) for name, shape in shapes.items()}
  nest = lambda flat: traverse_util.unflatten_dict(
    {k: jnp.asarray(v) for k, v in flat.items()}, sep='/'
  )
  params = nest(values)
  tx = optimizer.adamw(optimizer.cosine_schedule(0.1, 10), weight_decay=0.02)
  state = tx.init(params)
  update = jax.jit(tx.update)
  first = dict.fromkeys(shapes, 0.0)
  second = dict.fromkeys(shapes, 0.0)
  for step in range(3):
    gradients = {name: rng.randn(*shape) for name, shape in shapes.items()}
    updates, state = update(nest(gradients), state, params)
    params = optax.apply_updates(params, updates)
    rate = 0.1 * math.cos(7 * math.pi / 16 * step / 10)
    for name, g in gradients.items():
      first[name] = 0.9 * first[name] + 0.1 * g
      second[name] = 0.999 * second[name] + 0.001 * g**2
      mean = first[name] / (1 - 0.9 ** (step + 1))
      square = second[name] / (1 - 0.999 ** (step + 1))
      if name in decayed:
        values[name] = values[name] * (1 - rate * 0.02)
      values[name] = values[name] - rate * mean / (np.sqrt(square) + 1e-8)
  for name, value in traverse_util.flatten_dict(params, sep='/').items():
    np.testing.assert_allclose(value, values[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('shape', [(3, 3, 8, 16), (2, 2, 3, 40), (1, 1, 6, 6)])
def test_orthogonal_direction_is_that_of_optax(shape):
  kernel = np.random.RandomState(0).randn(*shape).astype(np.float32)
  ours = optimizer.orthogonalize(jnp.asarray(kernel))
  matrices = optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)
  tx = optax.contrib.scale_by_muon(
    ns_steps=4,
    nesterov=False,
    weight_dimension_numbers={'kernel': matrices},
  )
  tree = {'kernel': jnp.asarray(kernel)}
  theirs, _ = tx.update(tree, tx.init(tree))
  np.testing.assert_allclose(ours, theirs['kernel'], atol=2e-5)
  values = np.linalg.svd(
    np.asarray(ours).reshape(-1, shape[-1]), compute_uv=False
  )
  assert values.min() > 0.3
  assert values.max() < 1.3


def test_muon_turns_kernels_by_the_rate_whatever_the_scale_of_gradients():
  rng = np.random.RandomState(0)
  draw = lambda *shape: jnp.asarray(rng.randn(*shape), jnp.float32)
  params = {
    'conv': {'kernel': 5 * draw(3, 3, 4, 8)},
    'classifier': {'kernel': draw(8, 3), 'bias': draw(3)},
  }
  gradients = jax.tree.map(lambda p: draw(*p.shape), params)
  tx = optimizer.muon(lambda _: 0.01, weight_decay=0.5)
  plain = optimizer.sgd(lambda _: 0.03, weight_decay=0.5)

  def after(tx, scale):
    scaled = jax.tree.map(lambda g: scale * g, gradients)
    updates, _ = jax.jit(tx.update)(scaled, tx.init(params), params)
    return optax.apply_updates(params, updates)

  new, larger, reference = after(tx, 1.0), after(tx, 10.0), after(plain, 1.0)
  kernel, old = (np.asarray(t['conv']['kernel']) for t in (new, params))
  np.testing.assert_allclose(larger['conv']['kernel'], kernel, atol=1e-5)
  moved = kernel - 4 * old / np.linalg.norm(old)  # √(2·8) is the length.
  assert np.linalg.norm(moved) == pytest.approx(4 * 0.01, rel=1e-3)
  assert (moved * np.asarray(gradients['conv']['kernel'])).sum() < 0
  for name in ('kernel', 'bias'):
    np.testing.assert_allclose(
      new['classifier'][name], reference['classifier'][name], rtol=1e-5
    )


def test_layers_near_the_image_learn_and_decay_more_slowly():
  params = tiny_vit(depth=2)
  gradients = jax.tree.map(jnp.ones_like, params)  # Adam's first step is 1.
  tx = optimizer.adamw(lambda _: 0.1, weight_decay=0.5, layer_decay=0.5)
  updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
  rates = {
    'cls': 0.0125,
    'position': 0.0125,
    'patch': 0.0125,
    'block1': 0.025,
    'block2': 0.05,
    'norm': 0.05,
    'classifier': 0.1,
    'rotation': 0.1,
  }
  assert set(updates) == set(rates)
  for name, rate in rates.items():
    for update, p in zip(
      jax.tree.leaves(updates[name]), jax.tree.leaves(params[name]), strict=True
    ):
      decays = p.ndim > 1 and name not in ('cls', 'position')
      wanted = -rate * (1 + 0.5 * p) if decays else np.full(p.shape, -rate)
      np.testing.assert_allclose(update, wanted, rtol=1e-5, atol=1e-6)


def test_layer_decay_is_for_vits():
  params = {'stem': {'kernel': jnp.ones((2, 2))}}
  optimizer.adamw(lambda _: 0.1, 0.0).init(params)
  with pytest.raises(UserError, match=r'layer_decay of 0\.5 .* ViT'):
    optimizer.adamw(lambda _: 0.1, 0.0, layer_decay=0.5).init(params)
