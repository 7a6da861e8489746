"""The networks have the published sizes, and any image fits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flatmatch_jax import models
from flatmatch_jax.models import resnet, vit
from flatmatch_jax.models.resnet import ResNet
from flatmatch_jax.models.wide_resnet import WideResNet
from flatmatch_jax.types import Head, UserError

# The smallest of each kind; all take images of 8x8.
TINY = {
  'wide': functools.partial(WideResNet, 3, blocks=1, width=1, strides=(1, 2)),
  'resnet': functools.partial(ResNet, 3, blocks=(1, 1), width=4),
  'vit': functools.partial(
    vit.VisionTransformer, 3, patch=4, size=8, depth=2, num_heads=2
  ),
}


def example(model, seed=0):
  """Random parameters, biases and norms too, initial statistics, images."""
  rng = np.random.RandomState(seed)
  x = rng.randn(4, 8, 8, 3).astype(np.float32)
  init = lambda: model.init(jax.random.key(0), x, train=True)
  abstract = jax.eval_shape(init)
  params = jax.tree.map(
    lambda p: (0.3 * rng.randn(*p.shape)).astype(p.dtype), abstract['params']
  )
  stats = jax.tree.map(
    lambda s: (0.5 + rng.rand(*s.shape)).astype(s.dtype),
    abstract.get('batch_stats', {}),
  )
  return {'params': params, 'batch_stats': stats}, x


def shapes(name, classes, shape, **kwargs):
  model = models.create(name, classes, **kwargs)
  images = jnp.zeros((1, *shape))
  init = lambda: model.init(jax.random.key(0), images, train=True)
  return model, jax.eval_shape(init)


@pytest.mark.parametrize(
  ('name', 'classes', 'size', 'number'),
  [
    ('wrn_28_2', 10, 32, 1_469_642),
    ('wrn_28_8', 100, 32, 23_409_092),
    ('wrn_37_2', 10, 96, 5_933_770),
    ('resnet_18', 1000, 224, 11_689_512),
    ('resnet_34', 1000, 224, 21_797_672),
    ('resnet_50', 1000, 224, 25_557_032),
    ('vit_tiny_2', 10, 32, 5_392_714),
    ('vit_small_16', 1000, 224, 22_050_664),
    ('vit_base_16', 1000, 224, 86_567_656),
  ],
)
def test_parameter_counts(name, classes, size, number):
  _, variables = shapes(name, classes, (size, size, 3))
  assert sum(x.size for x in jax.tree.leaves(variables['params'])) == number


@pytest.mark.parametrize(
  ('name', 'features'),
  [('wrn_28_2', 128), ('resnet_50', 2048), ('vit_tiny_4', 192)],
)
def test_heads_add_four_times_features_plus_four(name, features):
  _, plain = shapes(name, 10, (32, 32, 3))
  _, more = shapes(name, 10, (32, 32, 3), heads=(Head('rotation', 4),))
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree['params']))
  assert count(more) - count(plain) == 4 * features + 4


@pytest.mark.parametrize('name', TINY)
def test_an_evaluated_head_classifies_outside_training(name):
  heads = (Head('embedding', 5, hidden=True), Head('other', evaluated=True))
  model = TINY[name](heads=heads)
  variables, images = example(model)
  run = lambda v, train: model.apply(
    v, images, train=train, mutable=['batch_stats']
  )
  found = [
    jax.jit(run, static_argnums=1)(variables, t)[0] for t in (True, False)
  ]
  params = variables['params']
  dense = lambda x, name: x @ params[name]['kernel'] + params[name]['bias']
  for prediction, classifier in zip(
    found, ('classifier', 'other'), strict=True
  ):
    logits = dense(prediction.features, classifier)
    np.testing.assert_allclose(prediction.logits, logits, rtol=1e-5, atol=1e-6)
    hidden = jax.nn.relu(dense(prediction.features, 'embedding_hidden'))
    np.testing.assert_allclose(
      prediction.heads['embedding'], dense(hidden, 'embedding'), 1e-5, 1e-6
    )


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


def test_unknown_model_lists_what_is_known():
  for name in [
    'wrn_11_2',
    'wrn_4_1',
    'wrn_28_0',
    'wrn_37_1',
    'resnet',
    'vit_base_0',
  ]:
    with pytest.raises(UserError, match='wrn_28_2'):
      models.create(name, 10)


@pytest.mark.parametrize('depth', [10, 16])
@pytest.mark.parametrize('width', [1, 2, 8])
def test_network_equals_its_definition_written_out(width, depth):
  """TorchSSL's WideResNet, block by block, with lax's convolution."""
  model = models.create(f'wrn_{depth}_{width}', 3)
  variables, x = example(model)
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

  def block(x, p, s, stride, activate_before_residual):
    equal_in_out = 'shortcut' not in p
    if not equal_in_out and activate_before_residual:
      x = norm_act(x, p['norm1'], s['norm1'])
    else:
      out = norm_act(x, p['norm1'], s['norm1'])
    out = conv(out if equal_in_out else x, p['conv1'], stride)
    out = conv(norm_act(out, p['norm2'], s['norm2']), p['conv2'])
    return (x if equal_in_out else conv(x, p['shortcut'], stride)) + out

  @jax.jit
  def definition(x):
    y = conv(x, params['stem'])
    for stage, stride in ((1, 1), (2, 2), (3, 2)):
      for number in range(1, (depth - 4) // 6 + 1):
        name = f'stage{stage}_block{number}'
        y = block(
          y,
          params[name],
          stats[name],
          stride if number == 1 else 1,
          activate_before_residual=stage == number == 1,
        )
    y = norm_act(y, params['norm'], stats['norm']).mean((1, 2))
    return y @ params['classifier']['kernel'] + params['classifier']['bias']

  assert ('shortcut' in params['stage1_block1']) == (width > 1)
  logits = definition(x)
  got = jax.jit(lambda v: model.apply(v, x, train=False))(variables)
  scale = np.abs(logits).max()
  np.testing.assert_allclose(got.logits, logits, rtol=1e-4, atol=1e-5 * scale)


def test_training_returns_the_statistics_of_the_batch():
  model = models.create('wrn_10_1', 3)
  variables, x = example(model)
  _, updates = jax.jit(
    lambda v: model.apply(v, x, train=True, mutable=['batch_stats'])
  )(variables)
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
  new = updates['batch_stats']['stage1_block1']['norm1']
  mean, var = stem.mean((0, 1, 2)), stem.var((0, 1, 2))
  np.testing.assert_allclose(new['mean'], mean, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(new['var'], var, rtol=1e-4)
  assert jax.tree.structure(updates['batch_stats']) == jax.tree.structure(
    variables['batch_stats']
  )


@pytest.mark.parametrize('name', ['wide', 'resnet'])
def test_statistics_do_not_depend_on_earlier_ones(name):
  model = TINY[name]()
  variables, x = example(model)
  run = jax.jit(
    lambda v: model.apply(v, x, train=True, mutable=['batch_stats'])[1]
  )
  other = jax.tree.map(lambda s: s + 1, variables['batch_stats'])
  one, two = run(variables), run(variables | {'batch_stats': other})
  if name == 'wide':  # Its first norm is dead: see the definition above.
    for tree in (one, two):
      del tree['batch_stats']['stage2_block1']['norm1']
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_unknown_dtype():
  with pytest.raises(UserError, match=r"'float64'.*float32, bfloat16"):
    models.create('wrn_10_1', 3, dtype='float64')


@pytest.mark.parametrize('name', TINY)
def test_bfloat16_stays_inside(name):
  """Products in bfloat16; parameters, statistics and results in float32."""
  plain, model = TINY[name](), TINY[name](dtype=jnp.bfloat16)
  variables, x = example(model)

  @jax.jit
  def run(variables):
    wide = plain.apply(variables, x, train=False)
    return (
      wide,
      model.apply(
        variables,
        x,
        train=True,
        mutable=['batch_stats', 'intermediates'],
        capture_intermediates=True,
      ),
      model.apply(variables, x, train=False),
    )

  wide, (trained, updates), narrow = run(variables)
  initial = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=True))
  for tree in (initial, trained, updates.get('batch_stats'), narrow):
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree))
  inside = updates['intermediates']
  stem = 'patch' if name == 'vit' else 'stem'
  block = inside['block2' if name == 'vit' else 'stage1_block1']
  layers = ('qkv', 'mlp2') if name == 'vit' else ('conv1', 'conv2', 'norm2')
  for outputs in (inside[stem], block, *(block[layer] for layer in layers)):
    assert outputs['__call__'][0].dtype == jnp.bfloat16
  assert inside['norm']['__call__'][0].dtype == (
    jnp.bfloat16 if name == 'resnet' else jnp.float32  # There, in the stem.
  )
  scale = np.abs(wide.logits).max()
  np.testing.assert_allclose(narrow.logits, wide.logits, atol=0.04 * scale)
  assert (narrow.logits != wide.logits).any()


@pytest.mark.parametrize('name', TINY)
def test_remat_changes_memory_only(name):
  pair = [TINY[name](remat=remat) for remat in (False, True)]
  variables, x = example(pair[0])
  init = lambda model: model.init(jax.random.key(0), x, train=True)
  trees = [jax.eval_shape(lambda m=model: init(m)) for model in pair]
  assert trees[0] == trees[1]

  def loss(params, model):
    prediction, updates = model.apply(
      variables | {'params': params},
      x,
      train=True,
      mutable=['batch_stats'],
      rngs={'dropout': jax.random.key(3)},
    )
    return jnp.square(prediction.logits).sum(), updates

  gradient = jax.grad(loss, has_aux=True)
  both = jax.jit(lambda params: [gradient(params, model) for model in pair])
  traced = both.trace(variables['params'])
  blocks = sum('block' in block for block in variables['params'])
  assert str(traced.jaxpr).count('prevent_cse=True') == blocks
  results = traced.lower().compile()(variables['params'])
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_resnet_strides_in_its_3x3_convolutions():
  model, variables = shapes('resnet_50', 10, (224, 224, 3))
  _, captured = jax.eval_shape(
    lambda v, x: model.apply(
      v, x, train=False, capture_intermediates=True, mutable=['intermediates']
    ),
    variables,
    jnp.zeros((1, 224, 224, 3)),
  )
  tree = captured['intermediates']
  size = lambda node: node['__call__'][0].shape[1:]
  assert size(tree['stem']) == (112, 112, 64)
  assert [name for name in tree if name.startswith('stage')] == [
    f'stage{stage}_block{block}'
    for stage, blocks in ((1, 3), (2, 4), (3, 6), (4, 3))
    for block in range(1, blocks + 1)
  ]
  for stage, before, after in (
    (1, 56, 56),
    (2, 56, 28),
    (3, 28, 14),
    (4, 14, 7),
  ):
    width = 32 * 2**stage
    first = tree[f'stage{stage}_block1']
    assert size(first['conv1']) == (before, before, width)
    assert size(first['conv2']) == (after, after, width)
    assert size(first) == (after, after, 4 * width)
    assert 'shortcut' not in tree[f'stage{stage}_block2']


def test_resnet_equals_its_definition_written_out():
  model = TINY['resnet']()
  variables, x = example(model)
  params, stats = variables['params'], variables['batch_stats']

  def conv(x, p, stride=1):
    pad = p['kernel'].shape[0] // 2
    return jax.lax.conv_general_dilated(
      x,
      p['kernel'],
      (stride, stride),
      ((pad, pad), (pad, pad)),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )

  def norm(x, p, s):
    return (x - s['mean']) / jnp.sqrt(s['var'] + 1e-5) * p['scale'] + p['bias']

  relu = lambda x: jnp.maximum(x, 0)

  @jax.jit
  def definition(x):
    y = relu(norm(conv(x, params['stem'], 2), params['norm'], stats['norm']))
    y = jnp.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)))  # After ReLU 0 is low.
    rows = jnp.stack([y[:, i : i + 3 : 2] for i in range(3)]).max(0)
    y = jnp.stack([rows[:, :, i : i + 3 : 2] for i in range(3)]).max(0)
    for stage, stride in ((1, 1), (2, 2)):
      p, s = params[f'stage{stage}_block1'], stats[f'stage{stage}_block1']
      h = relu(norm(conv(y, p['conv1']), p['norm1'], s['norm1']))
      h = relu(norm(conv(h, p['conv2'], stride), p['norm2'], s['norm2']))
      h = norm(conv(h, p['conv3']), p['norm3'], s['norm3'])
      y = conv(y, p['shortcut'], stride)
      y = relu(h + norm(y, p['shortcut_norm'], s['shortcut_norm']))
    y = y.mean((1, 2))
    return y @ params['classifier']['kernel'] + params['classifier']['bias']

  got = jax.jit(lambda v: model.apply(v, x, train=False))(variables)
  np.testing.assert_allclose(got.logits, definition(x), rtol=1e-4, atol=1e-5)


def test_vit_equals_its_definition_written_out():
  model = TINY['vit']()
  variables, x = example(model)
  # Large enough to tell GELU from its approximation.
  params = jax.tree.map(lambda p: 3 * p, variables['params'])

  def dense(x, p):
    return x @ p['kernel'] + p['bias']

  def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return x * p['scale'] + p['bias']

  def heads(x):  # [B, T, 8] to [B, 2, T, 4].
    return x.reshape(*x.shape[:2], 2, 4).transpose(0, 2, 1, 3)

  @jax.jit
  def definition(x):
    x = x.reshape(4, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(4, 4, 48) @ params['patch']['kernel'].reshape(48, 8)
    x = x + params['patch']['bias']
    cls = jnp.tile(params['cls'], (4, 1, 1))
    x = jnp.concatenate([cls, x], 1) + params['position']
    for block in (1, 2):
      p = params[f'block{block}']
      q, k, v = jnp.split(dense(norm(x, p['norm1']), p['qkv']), 3, axis=-1)
      weights = heads(q) @ heads(k).transpose(0, 1, 3, 2) / np.sqrt(4)
      y = jax.nn.softmax(weights, axis=-1) @ heads(v)
      x = x + dense(y.transpose(0, 2, 1, 3).reshape(x.shape), p['out'])
      y = dense(norm(x, p['norm2']), p['mlp1'])
      y = y * jax.scipy.stats.norm.cdf(y)
      x = x + dense(y, p['mlp2'])
    return dense(norm(x, params['norm'])[:, 0], params['classifier'])

  got = jax.jit(lambda p: model.apply({'params': p}, x, train=False))(params)
  np.testing.assert_allclose(got.logits, definition(x), rtol=1e-4, atol=1e-5)


def test_vit_starts_small_and_has_no_statistics():
  model = TINY['vit'](size=64, depth=1)
  x = jnp.zeros((1, 8, 8, 3))
  variables = jax.jit(lambda: model.init(jax.random.key(0), x, train=True))()
  assert set(variables) == {'params'}
  params = variables['params']
  for leaf in (
    params['cls'],
    params['position'],
    params['patch']['kernel'],
    params['block1']['qkv']['kernel'],
    params['classifier']['kernel'],
  ):
    assert 0.012 < leaf.std() < 0.023  # Cut at 0.04, 0.0176 are left.
    assert np.abs(leaf).max() <= 0.04
  assert not params['block1']['mlp1']['bias'].any()


@pytest.mark.parametrize('shape', [(30, 32, 3), (32, 30, 3)])
def test_patches_must_divide_the_image(shape):
  with pytest.raises(UserError, match=f'{shape[0]}x{shape[1]} .* 4x4'):
    shapes('vit_tiny_4', 10, shape)


def test_vit_takes_oblong_and_grey_images():
  _, variables = shapes('vit_tiny_4', 10, (8, 16, 1))
  assert variables['params']['position'].shape == (1, 1 + 2 * 4, 192)
  assert variables['params']['patch']['kernel'].shape == (4, 4, 1, 192)


def test_stochastic_depth_needs_training_and_a_key():
  model = TINY['vit'](drop_path=0.5)
  variables, x = example(model)

  @jax.jit
  def run(key):
    apply = functools.partial(model.apply, variables, x)
    return (
      apply(train=False).logits,
      apply(train=False, rngs={'dropout': key}).logits,
      apply(train=True).logits,
      apply(train=True, rngs={'dropout': key}).logits,
    )

  still, with_key, without_key, dropped = run(jax.random.key(0))
  np.testing.assert_array_equal(still, with_key)
  np.testing.assert_array_equal(still, without_key)
  assert (still != dropped).any()
  np.testing.assert_array_equal(run(jax.random.key(0))[3], dropped)
  assert (run(jax.random.key(1))[3] != dropped).any()


def test_branches_are_dropped_by_example_and_keep_their_mean():
  block = vit.Block(num_heads=2, drop=0.25, dtype=jnp.float32)
  key = jax.random.key(0)
  branch = np.full((4000, 2, 3), 3, np.float32)
  out = block.apply({}, branch, rngs={'dropout': key}, method='_keep')
  factors = np.asarray(out) / branch
  assert (factors == factors[:, :1, :1]).all()
  kept = factors[:, 0, 0] > 0
  np.testing.assert_allclose(factors[kept], 1 / 0.75, rtol=1e-6)
  assert kept.mean() == pytest.approx(0.75, abs=0.03)
  assert factors.mean() == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize(
  ('depth', 'train', 'keys', 'rates'),
  [
    (5, True, ('dropout',), [0, 0.05, 0.1, 0.15, 0.2]),
    (1, True, ('dropout',), [0]),
    (3, False, ('dropout',), [0, 0, 0]),
    (3, True, (), [0, 0, 0]),
  ],
)
def test_rates_of_stochastic_depth_rise_linearly(depth, train, keys, rates):
  model = TINY['vit'](depth=depth, drop_path=0.2)
  variables, x = example(model)
  seen = []

  def note(call, args, kwargs, context):
    if context.method_name == '__call__' and hasattr(context.module, 'drop'):
      seen.append(context.module.drop)
    return call(*args, **kwargs)

  rngs = {name: jax.random.key(0) for name in keys}
  with nn.intercept_methods(note):
    jax.eval_shape(
      lambda v: model.apply(v, x, train=train, rngs=rngs), variables
    )
  assert seen == pytest.approx(rates)


def test_layers_of_a_vit():
  variables, _ = example(TINY['vit'](depth=3, heads=(Head('rotation', 4),)))
  params = variables['params']
  assert vit.depth(params) == 3
  assert {name: vit.layer((name, 'kernel'), 3) for name in params} == {
    'cls': 0,
    'position': 0,
    'patch': 0,
    'block1': 1,
    'block2': 2,
    'block3': 3,
    'norm': 3,
    'classifier': 4,
    'rotation': 4,
  }


def test_layers_of_a_resnet():
  variables, _ = example(TINY['resnet'](heads=(Head('rotation', 4),)))
  params = variables['params']
  assert resnet.depth(params) == 2
  assert {name: resnet.layer((name, 'x'), 2) for name in params} == {
    'stem': 0,
    'norm': 0,
    'stage1_block1': 1,
    'stage2_block1': 2,
    'classifier': 3,
    'rotation': 3,
  }


def test_each_network_counts_its_own_layers_or_none():
  for name, network in (('wide', None), ('resnet', resnet), ('vit', vit)):
    params = example(TINY[name]())[0]['params']
    assert models.with_layers(params) is network, name
