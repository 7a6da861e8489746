"""What public files of weights call the parameters of a network.

Each function takes the name of a parameter here, such as
'block1/qkv/kernel', and tells where it is in a file; None if files have no such
parameter, as for extra heads.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from flatmatch_jax.system.array_files import Stored

_GOOGLE = {
  'cls': 'cls',
  'position': 'Transformer/posembed_input/pos_embedding',
  'patch': 'embedding',
  'block': 'Transformer/encoderblock_{}/',
  'norm1': 'LayerNorm_0',
  'qkv': 'MultiHeadDotProductAttention_1/{}',
  'out': 'MultiHeadDotProductAttention_1/out',
  'norm2': 'LayerNorm_2',
  'mlp1': 'MlpBlock_3/Dense_0',
  'mlp2': 'MlpBlock_3/Dense_1',
  'norm': 'Transformer/encoder_norm',
  'classifier': 'head',
}
_TIMM = {
  'cls': 'cls_token',
  'position': 'pos_embed',
  'patch': 'patch_embed.proj',
  'block': 'blocks.{}.',
  'norm1': 'norm1',
  'qkv': 'attn.qkv',
  'out': 'attn.proj',
  'norm2': 'norm2',
  'mlp1': 'mlp.fc1',
  'mlp2': 'mlp.fc2',
  'norm': 'norm',
  'classifier': 'head',
}
_RESNET = {
  'stem': 'conv1',
  'norm': 'bn1',
  'conv1': 'conv1',
  'norm1': 'bn1',
  'conv2': 'conv2',
  'norm2': 'bn2',
  'conv3': 'conv3',
  'norm3': 'bn3',
  'shortcut': 'downsample.0',
  'shortcut_norm': 'downsample.1',
  'classifier': 'fc',
}
_LEAVES = {
  'kernel': 'weight',
  'scale': 'weight',
  'bias': 'bias',
  'mean': 'running_mean',
  'var': 'running_var',
}
# Of blocks: a file that has one more is of another network.
OF_BLOCKS = re.compile(r'Transformer/encoderblock_|blocks\.|layer\d+\.')
# Says how many batches a running statistic has seen, which nothing needs.
COUNTER = 'num_batches_tracked'


class Source(NamedTuple):
  """How arrays of a file make a parameter: side by side on its last axis."""

  names: tuple[str, ...]
  heads: int | None = None  # The axis that the file splits into two by heads.
  axes: tuple[int, ...] | None = None  # The order in which the file's follow.

  def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape in the file as it will be here."""
    if (at := self.heads) is not None:
      shape = (*shape[:at], math.prod(shape[at : at + 2]), *shape[at + 2 :])
    if self.axes is not None and len(self.axes) == len(shape):
      shape = tuple(shape[axis] for axis in self.axes)
    return shape

  def read(self, arrays: dict[str, Stored]) -> np.ndarray:
    parts = []
    for name in self.names:
      part = arrays[name].read()
      if self.axes is not None:
        part = part.transpose(self.axes)
      parts.append(part.reshape(self.shape(arrays[name].shape)))
    return np.concatenate(parts, axis=-1)


def google(name: str) -> Source | None:
  """A ViT of google-research/vision_transformer."""
  path = _vit(name, _GOOGLE)
  if path is None:
    return None
  if '/qkv/' in name:
    names = tuple(path.format(part) for part in ('query', 'key', 'value'))
    return Source(names, heads=1 if name.endswith('kernel') else 0)
  return Source((path,), heads=0 if name.endswith('out/kernel') else None)


def timm(name: str) -> Source | None:
  """A ViT of timm."""
  path = _vit(name, _TIMM)
  return None if path is None else _torch(path, name.startswith('patch/'))


def resnet(name: str) -> Source | None:
  """A ResNet of torchvision or timm, which kept torchvision's names."""
  *modules, leaf = name.split('/')
  if modules[-1] not in _RESNET:
    return None
  path = f'{_RESNET[modules[-1]]}/{leaf}'
  if block := re.fullmatch(r'stage(\d+)_block(\d+)', modules[0]):
    path = f'layer{block[1]}.{int(block[2]) - 1}.{path}'
  return _torch(path, convolves=modules[0] != 'classifier')


def _vit(name: str, table: dict[str, str]) -> str | None:
  """The path of a parameter with its modules renamed; None for extra heads."""
  first, *rest = name.split('/')
  if first.startswith('block'):
    module, *rest = rest
    first = table['block'].format(int(first[len('block') :]) - 1)
    return '/'.join([first + table[module], *rest])
  return '/'.join([table[first], *rest]) if first in table else None


def _torch(path: str, convolves: bool) -> Source:
  """From 'bn1/scale' to bn1.weight; kernels lie the other way round."""
  module, slash, leaf = path.rpartition('/')
  axes = None
  if leaf == 'kernel':
    axes = (2, 3, 1, 0) if convolves else (1, 0)
  return Source((f'{module}.{_LEAVES[leaf]}' if slash else path,), axes=axes)
