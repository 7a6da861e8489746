"""ResNets from public files give what a plain definition of them gives.

The definition works on the file's own arrays, in numpy and in torch's order of
axes: as torchvision's resnet.py has it, in evaluation.
"""

import jax
import numpy as np
import pytest
from test_pretrained import save_safetensors

from flatmatch_jax.models import pretrained
from flatmatch_jax.models.resnet import Basic, Bottleneck, ResNet
from flatmatch_jax.types import UserError

WIDTH, BLOCKS = 4, (2, 1, 1)
KINDS = {'basic': (Basic, 1), 'bottleneck': (Bottleneck, 4)}


def file_of(kind, classes=3, blocks=BLOCKS, counters=False, seed=0):
  """A state dict: the names of torchvision, and of timm."""
  rng, expansion = np.random.RandomState(seed), KINDS[kind][1]
  arrays = {}

  def conv(name, out, inside, size):
    scale = 1 / np.sqrt(inside * size**2)
    arrays[f'{name}.weight'] = scale * rng.randn(out, inside, size, size)

  def norm(name, out):
    arrays[f'{name}.weight'] = rng.uniform(0.5, 1.5, out)
    arrays[f'{name}.bias'] = 0.3 * rng.randn(out)
    arrays[f'{name}.running_mean'] = 0.3 * rng.randn(out)
    arrays[f'{name}.running_var'] = rng.uniform(1e-5, 2, out)  # Epsilon counts.
    if counters:
      arrays[f'{name}.num_batches_tracked'] = np.zeros(())

  conv('conv1', WIDTH, 3, 7)
  norm('bn1', WIDTH)
  inside = WIDTH
  for stage, count in enumerate(blocks):
    width = WIDTH * 2**stage
    out = width * expansion
    for block in range(count):
      name = f'layer{stage + 1}.{block}'
      sizes = [(width, inside, 3), (width, width, 3)]
      if kind == 'bottleneck':
        sizes = [(width, inside, 1), (width, width, 3), (out, width, 1)]
      for i, size in enumerate(sizes):
        conv(f'{name}.conv{i + 1}', *size)
        norm(f'{name}.bn{i + 1}', size[0])
      if inside != out:
        conv(f'{name}.downsample.0', out, inside, 1)
        norm(f'{name}.downsample.1', out)
      inside = out
  arrays['fc.weight'] = rng.randn(classes, inside)
  arrays['fc.bias'] = rng.randn(classes)
  return {k: v.astype(np.float32) for k, v in arrays.items()}


def definition(arrays, x, blocks=BLOCKS):
  """Logits [N, K] of x [N, 3, H, W]."""

  def windows(x, size, stride, pad, fill=0.0):
    x = np.pad(
      x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=fill
    )
    seen = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
    return seen[:, :, ::stride, ::stride]

  def conv(x, name, stride=1):
    w = arrays[f'{name}.weight'].astype(np.float64)
    seen = windows(x, w.shape[-1], stride, w.shape[-1] // 2)
    return np.einsum('nchwij,ocij->nohw', seen, w)

  def norm(x, name):
    scale, bias, mean, var = (
      arrays[f'{name}.{leaf}'].astype(np.float64)[:, None, None]
      for leaf in ('weight', 'bias', 'running_mean', 'running_var')
    )
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias

  def relu(x):
    return np.maximum(x, 0)

  x = relu(norm(conv(x, 'conv1', 2), 'bn1'))
  x = windows(x, 3, 2, 1, fill=-np.inf).max((-2, -1))
  for stage, count in enumerate(blocks):
    for block in range(count):
      name = f'layer{stage + 1}.{block}'
      stride = 2 if stage and not block else 1
      if f'{name}.conv3.weight' in arrays:
        y = relu(norm(conv(x, f'{name}.conv1'), f'{name}.bn1'))
        y = relu(norm(conv(y, f'{name}.conv2', stride), f'{name}.bn2'))
        y = norm(conv(y, f'{name}.conv3'), f'{name}.bn3')
      else:
        y = relu(norm(conv(x, f'{name}.conv1', stride), f'{name}.bn1'))
        y = norm(conv(y, f'{name}.conv2'), f'{name}.bn2')
      if f'{name}.downsample.0.weight' in arrays:
        x = norm(
          conv(x, f'{name}.downsample.0', stride), f'{name}.downsample.1'
        )
      x = relu(x + y)
  return x.mean((2, 3)) @ arrays['fc.weight'].T + arrays['fc.bias']


def load(path, kind, classes=3, blocks=BLOCKS):
  block, _ = KINDS[kind]
  model = ResNet(classes, block=block, blocks=blocks, width=WIDTH)
  image = np.zeros((1, 32, 32, 3), np.float32)
  init = lambda: model.init(jax.random.key(0), image, train=True)
  drawn = jax.eval_shape(init)
  params, stats, report = pretrained.load(
    path, drawn['params'], drawn['batch_stats']
  )
  return model, {'params': params, 'batch_stats': stats}, report, drawn


@pytest.mark.parametrize(
  ('kind', 'side', 'counters'),
  # An odd number of pixels pads otherwise than an even one.
  [('basic', 32, True), ('bottleneck', 33, False)],
)
def test_logits_are_those_of_the_published_network(
  tmp_path, kind, side, counters
):
  arrays = file_of(kind, counters=counters)
  path = save_safetensors(tmp_path / 'w.safetensors', arrays)
  model, variables, report, _ = load(path, kind)
  x = np.random.RandomState(1).randn(2, side, side + 4, 3).astype(np.float32)
  got = jax.jit(lambda v, x: model.apply(v, x, train=False).logits)(
    variables, x
  )
  wanted = definition(arrays, x.transpose(0, 3, 1, 2))
  assert np.ptp(wanted) > 1
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
  number = len(jax.tree.leaves(variables))
  assert report.describe() == f'Loaded {number} of {number} arrays.'


def test_another_number_of_classes_draws_the_classifier_anew(tmp_path):
  arrays = file_of('basic') | {'extra.weight': np.zeros(2, np.float32)}
  path = save_safetensors(tmp_path / 'w', arrays)
  _, variables, report, drawn = load(path, 'basic', classes=5)
  for leaf, value in variables['params']['classifier'].items():
    assert value is drawn['params']['classifier'][leaf]
  kept = ('classifier/bias', 'classifier/kernel')
  assert tuple(sorted(report.kept)) == kept
  assert set(report.unused) == {'fc.weight', 'fc.bias', 'extra.weight'}
  for name in (*kept, *report.unused):
    assert name in report.describe()


@pytest.mark.parametrize(
  ('change', 'kind', 'match'),
  [
    # Of a deeper network, whose first blocks would fit.
    ({'blocks': (2, 2, 1)}, 'basic', r'has layer2\.1\.conv1\.weight, and'),
    ({'blocks': (2, 1)}, 'basic', r'nothing for \d+ .* stage3_block1/'),
    ({}, 'bottleneck', r'layer1\.0\.conv1\.weight .*conv1/kernel of \(1, 1'),
  ],
)
def test_weights_of_another_resnet_are_refused(tmp_path, change, kind, match):
  path = save_safetensors(tmp_path / 'w', file_of('basic', **change))
  with pytest.raises(UserError, match=match):
    load(path, kind)


def test_statistics_must_be_there(tmp_path):
  arrays = file_of('basic')
  del arrays['layer1.1.bn2.running_var']  # As of a network with GroupNorm.
  path = save_safetensors(tmp_path / 'w', arrays)
  with pytest.raises(UserError, match=r'for 1 of .*stage1_block2/norm2/var'):
    load(path, 'basic')
