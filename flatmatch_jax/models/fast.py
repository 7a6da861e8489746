"""Small networks made for speed, on CPUs and accelerators alike.

Few, wide 3×3 convolutions at low resolution, as in the CIFAR-10 speed runs
(https://arxiv.org/abs/2404.00498): nearly all the time goes into operations
that run close to a machine's peak. The stem halves an image until it has about
16 pixels per side, with few channels at first: an image of 64 pixels costs
1.2 times as much as one of 32, one of 128 1.5 times, one of 224 1.7 times.
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

_FIRST_SIDE = 16  # Pixels per side of the first stage, within a factor of √2.
_LEAST_CHANNELS = 8
_PART = 32  # Images per device.
_MAX_CHANNELS = 4096
NAMES = (
  'fast_WIDTH_WIDTH_WIDTH with one to six stages of up to 4096 channels, such '
  'as fast_32_64_128'
)
_kernel_init = nn.initializers.variance_scaling(2.0, 'fan_in', 'normal')


def halvings(side: int) -> int:
  """How often the stem halves images whose shorter side has `side` pixels."""
  return max(0, round(math.log2(side / _FIRST_SIDE)))


def conv_in_parts(images, kernel, *args, **kwargs):
  """`lax.conv_general_dilated`; on a CPU for a few images at a time.

  There the kernel's gradient takes up to twice as long per image for 64 images
  of 16×16 as for 16, because they do not fit into a core's cache.
  """
  conv = lambda x: jax.lax.conv_general_dilated(x, kernel, *args, **kwargs)
  part = _PART * jax.device_count()
  number, rest = divmod(len(images), part)
  if jax.default_backend() != 'cpu' or number < 2 or rest:
    return conv(images)
  # Every part takes rows from everywhere: they stay on their devices.
  rows = images.reshape(part, number, *images.shape[1:])
  parts = [conv(rows[:, i]) for i in range(number)]
  return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def max_pool(x):
  """The largest of each 2×2 square; an odd last row or column is dropped.

  By slices: on a CPU `nn.max_pool` takes 26 times as long, gradient included.
  """
  height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
  x = x[:, :height, :width]
  rows = jnp.maximum(x[:, ::2], x[:, 1::2])
  return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])


class Layer(nn.Module):
  """Convolution, BatchNorm, LeakyReLU."""

  features: int
  size: int
  stride: int
  norm: Any
  dtype: Any
  train: bool

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(
      self.features,
      (self.size, self.size),
      self.stride,
      padding=1,
      use_bias=False,
      kernel_init=_kernel_init,
      dtype=self.dtype,
      conv_general_dilated=conv_in_parts if self.train else None,
      name='conv',
    )(x)
    return nn.leaky_relu(self.norm(name='norm')(x), negative_slope=0.1)


class FastNet(nn.Module):
  """A stem, stages at half the resolution each, global max pooling.

  Attributes:
    widths: channels of each stage.
  """

  num_classes: int
  widths: tuple[int, ...] = (32, 64, 128)
  heads: tuple[Head, ...] = ()
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, x, train: bool) -> Prediction:
    norm = batch_norm(train, epsilon=1e-5, dtype=self.dtype)
    layer = functools.partial(
      nn.remat(Layer) if self.remat else Layer,
      norm=norm,
      dtype=self.dtype,
      train=train,
    )
    number = halvings(min(x.shape[1:3]))
    # Half the channels for each halving that is still to come.
    least = min(self.widths[0], _LEAST_CHANNELS)
    channels = lambda left: max(self.widths[0] // 2**left, least)
    size, stride = (4, 2) if number else (3, 1)
    x = layer(channels(max(number - 1, 0)), size, stride, name='stem')(x)
    for i in range(2, number + 1):
      x = layer(channels(number - i), 3, 2, name=f'halving{i}')(x)
    for stage, width in enumerate(self.widths):
      if stage:
        x = max_pool(x) if min(x.shape[1:3]) > 1 else x
        x = layer(width, 3, 1, name=f'stage{stage + 1}_widen')(x)
      x = x + layer(width, 3, 1, name=f'stage{stage + 1}')(x)
    features = x.max((1, 2)).astype(jnp.float32)
    return predict(features, self.num_classes, self.heads, train, nn.Dense)


def named(name: str):
  if not re.fullmatch(r'fast(_[1-9][0-9]{0,3}){1,6}', name):
    return None
  widths = tuple(map(int, name.split('_')[1:]))
  if max(widths) > _MAX_CHANNELS:
    return None
  return functools.partial(FastNet, widths=widths)
