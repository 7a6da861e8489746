"""Residual networks (https://arxiv.org/abs/1512.03385).

As in torchvision and timm: the stride sits in the 3x3 convolution ("v1.5"), the
last norm of a block starts at one like the others. The optimizer and the loader
of pretrained weights read parameters by name: stem, norm, stage1_block1, ….
"""

import functools
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flatmatch_jax.models.layers import batch_norm, predict
from flatmatch_jax.types import Head, Prediction

NAMES = 'resnet_18, resnet_34, resnet_50'
_kernel_init = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')


def _conv(x, features, name, dtype, size=1, stride=1):
  """A square convolution, padded alike on both sides, without a bias."""
  return nn.Conv(
    features,
    (size, size),
    stride,
    padding=size // 2,
    use_bias=False,
    kernel_init=_kernel_init,
    dtype=dtype,
    name=name,
  )(x)


def _shortcut(block, x, y):
  """x itself where the block's output y has its shape, else a projection."""
  if x.shape == y.shape:
    return x
  x = _conv(x, y.shape[-1], 'shortcut', block.dtype, stride=block.stride)
  return block.norm(name='shortcut_norm')(x)


def depth(params) -> int:
  """The number of stages; 0 where the parameters are not a ResNet's."""
  stage = params.get('stage1_block1', {})
  if 'norm1' not in stage or 'bias' in stage['conv1']:  # A wide ResNet has one.
    return 0
  return len({name.partition('_')[0] for name in params if 'block' in name})


def layer(path: tuple[str, ...], depth: int) -> int:
  """0 for the stem and its norm, k for stage k, `depth` + 1 above."""
  if path[0] in ('stem', 'norm'):
    return 0
  stage = re.match(r'stage(\d+)_', path[0])
  return int(stage.group(1)) if stage else depth + 1


class Basic(nn.Module):
  """Two 3x3 convolutions."""

  features: int
  stride: int
  norm: Any
  dtype: Any

  @nn.compact
  def __call__(self, x):
    conv = functools.partial(_conv, features=self.features, dtype=self.dtype)
    y = conv(x, name='conv1', size=3, stride=self.stride)
    y = nn.relu(self.norm(name='norm1')(y))
    y = self.norm(name='norm2')(conv(y, name='conv2', size=3))
    return nn.relu(_shortcut(self, x, y) + y)


class Bottleneck(nn.Module):
  """1x1 down to `features`, 3x3, 1x1 up to four times as many."""

  features: int
  stride: int
  norm: Any
  dtype: Any

  @nn.compact
  def __call__(self, x):
    conv = functools.partial(_conv, dtype=self.dtype)
    y = conv(x, self.features, 'conv1')
    y = nn.relu(self.norm(name='norm1')(y))
    y = conv(y, self.features, 'conv2', size=3, stride=self.stride)
    y = nn.relu(self.norm(name='norm2')(y))
    y = conv(y, 4 * self.features, 'conv3')
    y = self.norm(name='norm3')(y)
    return nn.relu(_shortcut(self, x, y) + y)


class ResNet(nn.Module):
  """Stem, stages of blocks, global average pooling, linear heads.

  Attributes:
    block: the class of all blocks.
    blocks: number of blocks of each stage; the default is ResNet-50.
    width: channels after the stem, doubled from stage to stage.
  """

  num_classes: int
  block: Any = Bottleneck
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64
  heads: tuple[Head, ...] = ()
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, x, train: bool) -> Prediction:
    norm = batch_norm(train, epsilon=1e-5, dtype=self.dtype)
    block_class = nn.remat(self.block) if self.remat else self.block
    x = _conv(x, self.width, 'stem', self.dtype, size=7, stride=2)
    x = nn.relu(norm(name='norm')(x))
    # Nothing is negative. jax2onnx would leave out the padding of max_pool.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))
    for stage, blocks in enumerate(self.blocks):
      for block in range(blocks):
        x = block_class(
          self.width * 2**stage,
          stride=2 if stage and block == 0 else 1,
          norm=norm,
          dtype=self.dtype,
          name=f'stage{stage + 1}_block{block + 1}',
        )(x)
    features = x.astype(jnp.float32).mean((1, 2))
    bound = 1 / math.sqrt(features.shape[-1])
    uniform = lambda rng, shape, dtype: jax.random.uniform(
      rng, shape, dtype, -bound, bound
    )
    dense = functools.partial(nn.Dense, kernel_init=uniform, bias_init=uniform)
    return predict(features, self.num_classes, self.heads, train, dense)


_PUBLISHED = {
  'resnet_18': functools.partial(ResNet, block=Basic, blocks=(2, 2, 2, 2)),
  'resnet_34': functools.partial(ResNet, block=Basic),
  'resnet_50': ResNet,
}


def named(name: str):
  return _PUBLISHED.get(name)
