"""The networks by name."""

import re
from typing import Any

import jax.numpy as jnp

from flatmatch_jax.models.fast import FastNet
from flatmatch_jax.models.resnet import ResNet
from flatmatch_jax.models.vit import VisionTransformer
from flatmatch_jax.models.wide_resnet import WideResNet
from flatmatch_jax.types import UserError

_KNOWN = (
  'fast_WIDTH_WIDTH_WIDTH with one to six stages of up to 4096 channels, such '
  'as fast_32_64_128; '
  'wrn_DEPTH_WIDTH with DEPTH = 6n + 4 up to 1000 and WIDTH up to 100, such as '
  'wrn_10_1, wrn_28_2, wrn_28_8; '
  'wrn_37_WIDTH with four stages and WIDTH > 1, such as wrn_37_2; resnet_50; '
  'vit_tiny_PATCH, vit_small_PATCH and vit_base_PATCH, such as vit_small_2, '
  'vit_base_16'
)
_MAX_DEPTH, _MAX_WIDTH = 1000, 100  # Tracing takes time for each layer.
_MAX_CHANNELS = 4096
_DTYPES = {
  'float32': jnp.float32,
  'bfloat16': jnp.bfloat16,
  'float16': jnp.float16,
}
_VITS: dict[str, dict[str, Any]] = {
  'tiny': {'size': 192, 'num_heads': 3, 'drop_path': 0.1},
  'small': {'size': 384, 'num_heads': 6, 'drop_path': 0.2},
  'base': {'size': 768, 'num_heads': 12, 'drop_path': 0.2},
}


def create(
  name: str,
  num_classes: int,
  heads=(),
  dtype: str = 'float32',
  remat: bool = False,
):
  """The network called `name`; raises UserError if there is none.

  In training its BatchNorm layers return the batch's own statistics, which the
  train step averages. A ViT has none.
  """
  if dtype not in _DTYPES:
    raise UserError(f'Unknown dtype {dtype!r}. Known: {", ".join(_DTYPES)}.')
  common: dict[str, Any] = {
    'heads': heads,
    'dtype': _DTYPES[dtype],
    'remat': remat,
  }
  if name == 'resnet_50':
    return ResNet(num_classes, **common)
  if re.fullmatch(r'fast(_[1-9][0-9]{0,3}){1,6}', name):
    widths = tuple(map(int, name.split('_')[1:]))
    if max(widths) <= _MAX_CHANNELS:
      return FastNet(num_classes, widths=widths, **common)
  if match := re.fullmatch(r'vit_(tiny|small|base)_([1-9][0-9]{0,3})', name):
    size, patch = match.groups()
    return VisionTransformer(
      num_classes, patch=int(patch), **_VITS[size], **common
    )
  if match := re.fullmatch(r'wrn_([0-9]{1,4})_([0-9]{1,3})', name):
    depth, width = map(int, match.groups())
    strides: tuple[int, ...] = (1, 2, 2)
    blocks, rest = divmod(depth - 4, 6)
    if depth == 37:  # 1 stem + 4 stages of 4 blocks of 2 + 4 shortcuts.
      # At width 1 the first shortcut, with a stride, would be no convolution.
      blocks, rest, strides = 4, int(width == 1), (2, 2, 2, 2)
    small = depth <= _MAX_DEPTH and width <= _MAX_WIDTH
    if small and not rest and blocks >= 1 and width >= 1:
      return WideResNet(
        num_classes,
        blocks=blocks,
        width=width,
        strides=strides,
        **common,
      )
  raise UserError(f'There is no model {name!r}. Known: {_KNOWN}.')
