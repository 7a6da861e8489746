"""A network's parameters from public files of weights, matched by name.

For ViTs two layouts are known, the .npz files of
google-research/vision_transformer and the names that timm gives in .safetensors
files; for ResNets the names of torchvision, which are also timm's.
"""

import math
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax import models
from flatmatch_jax.models import weight_names
from flatmatch_jax.models.weight_names import Source
from flatmatch_jax.system.array_files import open_arrays
from flatmatch_jax.types import PyTree, UserError

_MAX_TOKENS = 2**16  # Of a position embedding that is to be resized.


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


def load(
  path: str, params: PyTree, batch_stats: PyTree
) -> tuple[PyTree, PyTree, Report]:
  """Both of a ViT or ResNet, with what the file at `path` has for them.

  The position embedding is resized where the grid differs. The classifier is
  kept where its shape differs; elsewhere another shape is a UserError.
  """
  network = models.with_layers(params)
  if network is None:
    raise UserError(
      f'{path} can only start a ViT or a ResNet, and the network is another; '
      'choose a model vit_SIZE_PATCH, resnet_18, resnet_34 or resnet_50, or no '
      'pretrained weights.'
    )
  depth = network.depth(params)
  layer_of = lambda name: network.layer(tuple(name.split('/')), depth)
  # No name is in both: those of statistics end in mean and var.
  trees = [
    traverse_util.flatten_dict(tree, sep='/') for tree in (params, batch_stats)
  ]
  flat = trees[0] | trees[1]
  with open_arrays(path) as arrays:
    sources = _match(path, flat, arrays, network)
    values = {name: source.read(arrays) for name, source in sources.items()}
  resized = ''
  if 'position' in values:
    tokens, wanted = (x['position'].shape[1] for x in (values, flat))
    if tokens != wanted:
      old, new = _grid(path, tokens), _grid(path, wanted)
      values['position'] = _resize(values['position'], old, new)
      resized = f'from {old}x{old} to {new}x{new}'
  absent = [
    name for name in flat if name not in values and layer_of(name) <= depth
  ]
  if absent:
    raise UserError(
      f'{path} has nothing for {len(absent)} of the {len(flat)} parameters, '
      f'such as {absent[0]}; choose weights of the same network.'
    )
  used = {name for source in sources.values() for name in source.names}
  unused = tuple(
    name
    for name in arrays
    if name not in used and not name.endswith(weight_names.COUNTER)
  )
  if more := [n for n in unused if weight_names.OF_BLOCKS.match(n)]:
    raise UserError(
      f'{path} has {more[0]}, and the network nothing like it; choose weights '
      'of the same network.'
    )
  loaded = {k: jnp.asarray(v, flat[k].dtype) for k, v in values.items()}
  report = Report(
    loaded=tuple(loaded),
    kept=tuple(name for name in flat if name not in loaded),
    unused=unused,
    resized=resized,
  )
  full = flat | loaded
  new = [
    traverse_util.unflatten_dict({name: full[name] for name in tree}, sep='/')
    for tree in trees
  ]
  return new[0], new[1], report


def _match(path, flat, arrays, network) -> dict[str, Source]:
  """Where each parameter comes from; checks the shapes, and reads nothing."""
  kind, known = 'ResNet', 'torchvision and of timm'
  find = weight_names.resnet
  if network is models.vit:
    kind, known = 'ViT', 'google-research/vision_transformer and of timm'
    google = any(name.startswith('Transformer/') for name in arrays)
    find = weight_names.google if google else weight_names.timm
  sources = {}
  for name, like in flat.items():
    source = find(name)
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
        'same network.'
      )
  if not sources:
    raise UserError(
      f'{path} holds none of the names of a {kind}: '
      f'{", ".join([*arrays][:3])}. Known are those of {known}.'
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
