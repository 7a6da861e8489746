"""The networks by name."""

import re

from flatmatch_jax.models.wide_resnet import WideResNet
from flatmatch_jax.types import UserError

_KNOWN = (
  'wrn_DEPTH_WIDTH with DEPTH = 6n + 4, such as wrn_10_1, wrn_28_2, wrn_28_8; '
  'wrn_37_WIDTH with four stages, such as wrn_37_2'
)


def create(name: str, num_classes: int, bn_momentum: float = 0.999, heads=()):
  """The network called `name`; raises UserError if there is none."""
  match = re.fullmatch(r'wrn_(\d+)_(\d+)', name)
  if match is None:
    raise UserError(f'Unknown model {name!r}. Known: {_KNOWN}.')
  depth, width = map(int, match.groups())
  strides: tuple[int, ...] = (1, 2, 2)
  blocks, rest = divmod(depth - 4, 6)
  if depth == 37:  # 1 stem + 4 stages of 4 blocks of 2 + 4 shortcuts.
    blocks, rest, strides = 4, 0, (2, 2, 2, 2)
  if rest or blocks < 1 or width < 1:
    raise UserError(f'There is no model {name!r}. Known: {_KNOWN}.')
  return WideResNet(
    num_classes,
    blocks=blocks,
    width=width,
    strides=strides,
    bn_momentum=bn_momentum,
    heads=heads,
  )
