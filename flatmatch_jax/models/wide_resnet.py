"""Wide residual networks (https://arxiv.org/abs/1605.07146), as in TorchSSL.

The numbers published for this field come from one PyTorch port; this is its
network: biases in all convolutions, LeakyReLU 0.1, BatchNorm epsilon 1e-3.
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

_MAX_DEPTH, _MAX_WIDTH = 1000, 100  # Tracing takes time for each layer.
NAMES = (
  'wrn_DEPTH_WIDTH with DEPTH = 6n + 4 up to 1000 and WIDTH up to 100, such as '
  'wrn_10_1, wrn_28_2, wrn_28_8; '
  'wrn_37_WIDTH with four stages and WIDTH > 1, such as wrn_37_2'
)
_kernel_init = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')
_dense_init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'normal')
_activation = functools.partial(nn.leaky_relu, negative_slope=0.1)


def _conv(x, features, name, dtype, size=3, stride=1):
  """A square convolution whose bias starts as PyTorch's does."""
  bound = 1 / math.sqrt(size**2 * x.shape[-1])
  return nn.Conv(
    features,
    (size, size),
    stride,
    # PyTorch pads both sides alike; 'SAME' pads the far side at stride 2.
    padding=size // 2,
    kernel_init=_kernel_init,
    bias_init=lambda rng, shape, dtype: jax.random.uniform(
      rng, shape, dtype, -bound, bound
    ),
    dtype=dtype,
    name=name,
  )(x)


class Block(nn.Module):
  """Two convolutions, each after normalization and activation."""

  features: int
  stride: int
  first: bool  # The network's first block activates a shortcut that widens.
  norm: Any
  dtype: Any

  @nn.compact
  def __call__(self, x):
    same = x.shape[-1] == self.features
    conv = functools.partial(_conv, dtype=self.dtype)
    norm = self.norm(name='norm1')
    if same:
      y = _activation(norm(x))
    elif self.first:
      x = y = _activation(norm(x))
    else:
      # The port hands the raw input to both paths where the width changes;
      # its first norm is dead weight, kept so that parameters correspond.
      y = x
      if self.is_initializing():
        norm(x)
    y = conv(y, self.features, 'conv1', stride=self.stride)
    y = _activation(self.norm(name='norm2')(y))
    y = conv(y, self.features, 'conv2')
    if not same:
      x = conv(x, self.features, 'shortcut', size=1, stride=self.stride)
    return x + y


class WideResNet(nn.Module):
  """Stages of pre-activation blocks, global average pooling, linear heads.

  Attributes:
    blocks: number of blocks in each stage.
    width: factor on the stages' 16, 32, 64, … channels.
    strides: of each stage; (1, 2, 2) for the usual three.
  """

  num_classes: int
  blocks: int = 4
  width: int = 2
  strides: tuple[int, ...] = (1, 2, 2)
  heads: tuple[Head, ...] = ()
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, x, train: bool) -> Prediction:
    norm = batch_norm(train, epsilon=1e-3, dtype=self.dtype)
    block_class = nn.remat(Block) if self.remat else Block
    dense = functools.partial(nn.Dense, kernel_init=_dense_init)
    x = _conv(x, 16, 'stem', self.dtype)
    for stage, stride in enumerate(self.strides):
      for block in range(self.blocks):
        x = block_class(
          16 * self.width * 2**stage,
          stride=stride if block == 0 else 1,
          first=stage == block == 0,
          norm=norm,
          dtype=self.dtype,
          name=f'stage{stage + 1}_block{block + 1}',
        )(x)
    x = _activation(norm(name='norm', dtype=jnp.float32)(x))
    features = x.mean((1, 2))
    return predict(features, self.num_classes, self.heads, train, dense)


def named(name: str):
  if not (match := re.fullmatch(r'wrn_([0-9]{1,4})_([0-9]{1,3})', name)):
    return None
  depth, width = map(int, match.groups())
  strides: tuple[int, ...] = (1, 2, 2)
  blocks, rest = divmod(depth - 4, 6)
  if depth == 37:  # 1 stem + 4 stages of 4 blocks of 2 + 4 shortcuts.
    # At width 1 the first shortcut, with a stride, would be no convolution.
    blocks, rest, strides = 4, int(width == 1), (2, 2, 2, 2)
  fits = 1 <= width <= _MAX_WIDTH and depth <= _MAX_DEPTH
  if rest or blocks < 1 or not fits:
    return None
  return functools.partial(
    WideResNet, blocks=blocks, width=width, strides=strides
  )
