"""A ViT's parameters from public files of weights, matched by name.

Two layouts are known: the .npz files of google-research/vision_transformer and
the names that timm gives in .safetensors files.
"""

import math
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.models import vit
from flatmatch_jax.system.array_files import Stored, open_arrays
from flatmatch_jax.types import PyTree, UserError

_MAX_TOKENS = 2**16  # Of a position embedding that is to be resized.

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


class Report(NamedTuple):
  """What became of the names on both sides."""

  loaded: tuple[str, ...]  # Parameters that come from the file.
  kept: tuple[str, ...]  # Parameters that stay as they were.
  unused: tuple[str, ...]  # The file's names that nothing asked for.
  resized: str  # From which grid of positions to which; '' if equal.

  def describe(self) -> str:
    """One line for each kind that there is."""
    total = len(self.loaded) + len(self.kept)
    lines = [f'Loaded {len(self.loaded)} of {total} arrays.']
    if self.resized:
      lines.append(f'Resized the position embedding {self.resized}.')
    if self.kept:
      lines.append(f'Not in the file, kept as drawn: {", ".join(self.kept)}.')
    if self.unused:
      lines.append(f'In the file, not used: {", ".join(self.unused)}.')
    return ' '.join(lines)


class _Source(NamedTuple):
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


def load(path: str, params: PyTree) -> tuple[PyTree, Report]:
  """`params` of a ViT, with what the file at `path` has for them.

  The position embedding is resized where the grid differs. The classifier is
  kept where its shape differs; elsewhere another shape is a UserError.
  """
  if not vit.depth(params):
    raise UserError(
      f'{path} can only start a ViT, and the network is another; choose a '
      'model vit_SIZE_PATCH, or no pretrained weights.'
    )
  flat = traverse_util.flatten_dict(params, sep='/')
  layer_of = lambda name: vit.layer(tuple(name.split('/')), vit.depth(params))
  with open_arrays(path) as arrays:
    sources = _match(path, flat, arrays)
    values = {name: source.read(arrays) for name, source in sources.items()}
  resized = ''
  if 'position' in values:
    tokens, wanted = (x['position'].shape[1] for x in (values, flat))
    if tokens != wanted:
      old, new = _grid(path, tokens), _grid(path, wanted)
      values['position'] = _resize(values['position'], old, new)
      resized = f'from {old}x{old} to {new}x{new}'
  absent = [
    name
    for name in flat
    if name not in values and layer_of(name) <= vit.depth(params)
  ]
  if absent:
    raise UserError(
      f'{path} has nothing for {len(absent)} of the {len(flat)} parameters, '
      f'such as {absent[0]}; choose weights of the same kind of ViT.'
    )
  used = {name for source in sources.values() for name in source.names}
  loaded = {k: jnp.asarray(v, flat[k].dtype) for k, v in values.items()}
  return traverse_util.unflatten_dict(flat | loaded, sep='/'), Report(
    loaded=tuple(loaded),
    kept=tuple(name for name in flat if name not in loaded),
    unused=tuple(name for name in arrays if name not in used),
    resized=resized,
  )


def _match(path, flat, arrays) -> dict[str, _Source]:
  """Where each parameter comes from; checks the shapes, and reads nothing."""
  google = any(name.startswith('Transformer/') for name in arrays)
  sources = {}
  for name, like in flat.items():
    source = _google(name) if google else _timm(name)
    if source is None or not all(n in arrays for n in source.names):
      continue
    wanted = (*like.shape[:-1], like.shape[-1] // len(source.names))
    shapes = {n: arrays[n].shape for n in source.names}
    wrong = [
      n for n in shapes if not _fits(name, source.shape(shapes[n]), wanted)
    ]
    if not wrong:
      sources[name] = source
    elif not name.startswith('classifier/'):
      raise UserError(
        f'{wrong[0]} in {path} has shape {shapes[wrong[0]]}, which does not '
        f"make the network's {name} of {like.shape}; choose weights of the "
        'same size and patch.'
      )
  if not sources:
    raise UserError(
      f'{path} holds none of the names of a ViT: {", ".join([*arrays][:3])}. '
      'Known are those of google-research/vision_transformer and of timm.'
    )
  classifier = {'classifier/kernel', 'classifier/bias'}
  if not classifier <= sources.keys():  # Both or neither.
    return {k: v for k, v in sources.items() if k not in classifier}
  return sources


def _fits(name, shape, wanted):
  if name != 'position':
    return shape == wanted
  tokens = shape[1] if len(shape) == 3 else 0
  return 2 <= tokens <= _MAX_TOKENS and shape[::2] == wanted[::2]


def _google(name: str) -> _Source | None:
  path = _translate(name, _GOOGLE)
  if path is None:
    return None
  if '/qkv/' in name:
    names = tuple(path.format(part) for part in ('query', 'key', 'value'))
    return _Source(names, heads=1 if name.endswith('kernel') else 0)
  return _Source((path,), heads=0 if name.endswith('out/kernel') else None)


def _timm(name: str) -> _Source | None:
  path = _translate(name, _TIMM)
  if path is None:
    return None
  path = path.replace('/kernel', '.weight').replace('/scale', '.weight')
  axes = None
  if name.endswith('kernel'):
    axes = (2, 3, 1, 0) if name.startswith('patch/') else (1, 0)
  return _Source((path.replace('/bias', '.bias'),), axes=axes)


def _translate(name: str, table: dict[str, str]) -> str | None:
  """The path of a parameter with its modules renamed; None for extra heads."""
  first, *rest = name.split('/')
  if first.startswith('block'):
    module, *rest = rest
    first = table['block'].format(int(first[len('block') :]) - 1)
    return '/'.join([first + table[module], *rest])
  return '/'.join([table[first], *rest]) if first in table else None


def _grid(path, tokens):
  """The side of the square of patches beside the class token."""
  side = math.isqrt(tokens - 1)
  if side**2 != tokens - 1:
    raise UserError(
      f'The position embedding of {path} cannot be resized: {tokens} tokens '
      'are not a square and a class token. Use square images.'
    )
  return side


def _resize(position, old, new):
  """Bicubic, on the grid; the class token keeps its own."""
  grid = position[:, 1:].reshape(1, old, old, -1)
  shape = (1, new, new, grid.shape[-1])
  grid = np.asarray(jax.image.resize(grid, shape, 'bicubic'))
  return np.concatenate([position[:, :1], grid.reshape(1, new**2, -1)], axis=1)
