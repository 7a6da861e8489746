"""Vision transformers (https://arxiv.org/abs/2010.11929), as in USB and timm.

Parameters are named for what reads them by name, the optimizer and the loader
of pretrained weights: cls, position, patch, block1, block2, …, norm and heads.
"""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flatmatch_jax.models.layers import predict
from flatmatch_jax.types import Head, Prediction, UserError

_init = nn.initializers.truncated_normal(0.02)
_dense = functools.partial(nn.Dense, kernel_init=_init)
_norm = functools.partial(nn.LayerNorm, epsilon=1e-6)

NAMES = (
  'vit_tiny_PATCH, vit_small_PATCH and vit_base_PATCH, such as vit_small_2, '
  'vit_base_16'
)
_SIZES: dict[str, dict[str, Any]] = {
  'tiny': {'size': 192, 'num_heads': 3, 'drop_path': 0.1},
  'small': {'size': 384, 'num_heads': 6, 'drop_path': 0.2},
  'base': {'size': 768, 'num_heads': 12, 'drop_path': 0.2},
}
EMBEDDINGS = ('cls', 'position')  # Matrices by shape, yet not kernels.


def depth(params) -> int:
  """The number of blocks; 0 where the parameters are not a ViT's."""
  if not {'cls', 'position', 'patch', 'norm'} <= set(params):
    return 0
  return sum(re.fullmatch(r'block\d+', name) is not None for name in params)


def layer(path: tuple[str, ...], depth: int) -> int:
  """0 for the stem, k for block k, `depth` for the norm, `depth` + 1 above."""
  if path[0] in ('cls', 'position', 'patch'):
    return 0
  if path[0] == 'norm':
    return depth
  block = re.fullmatch(r'block(\d+)', path[0])
  return int(block.group(1)) if block else depth + 1


class Block(nn.Module):
  """Self-attention and a two-layer perceptron, each after a norm."""

  num_heads: int
  drop: float  # Probability that an example skips a branch.
  dtype: Any

  @nn.compact
  def __call__(self, x):
    dense = functools.partial(_dense, dtype=self.dtype)
    norm = functools.partial(_norm, dtype=self.dtype)  # Inside, float32.
    size = x.shape[-1]
    y = dense(3 * size, name='qkv')(norm(name='norm1')(x))
    y = y.reshape(*x.shape[:2], 3, self.num_heads, -1)
    # Its softmax is in float32, whatever the dtype.
    y = jax.nn.dot_product_attention(*jnp.moveaxis(y, 2, 0))
    x += self._keep(dense(size, name='out')(y.reshape(x.shape)))
    y = dense(4 * size, name='mlp1')(norm(name='norm2')(x))
    y = nn.gelu(y, approximate=False)
    return x + self._keep(dense(size, name='mlp2')(y))

  def _keep(self, branch):
    """Stochastic depth: the branch of some examples, its mean unchanged."""
    if not self.drop:
      return branch
    keep = 1 - self.drop
    rng = self.make_rng('dropout')
    kept = jax.random.bernoulli(rng, keep, (len(branch), 1, 1))
    return jnp.where(kept, branch / keep, 0)


class VisionTransformer(nn.Module):
  """Patches and a class token through blocks; the token feeds linear heads.

  Attributes:
    patch: side of a square patch in pixels; images must be divisible by it.
    size: of a token.
    depth: number of blocks.
    num_heads: of attention.
    drop_path: rate of stochastic depth in the last block, falling linearly to
      0 in the first. It needs train=True and an rng named 'dropout'; without
      one nothing is dropped.
  """

  num_classes: int
  patch: int = 16
  size: int = 768
  depth: int = 12
  num_heads: int = 12
  drop_path: float = 0.2
  heads: tuple[Head, ...] = ()
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(self, x, train: bool) -> Prediction:
    batch, height, width = x.shape[:3]
    if height % self.patch or width % self.patch:
      raise UserError(
        f'Images of {height}x{width} pixels cannot be cut into patches of '
        f'{self.patch}x{self.patch}; choose a patch size that divides both.'
      )
    x = nn.Conv(
      self.size,
      (self.patch, self.patch),
      self.patch,
      padding='VALID',
      kernel_init=_init,
      dtype=self.dtype,
      name='patch',
    )(x)
    x = x.reshape(batch, -1, self.size)
    cls = self.param('cls', _init, (1, 1, self.size))
    position = self.param('position', _init, (1, x.shape[1] + 1, self.size))
    cls = jnp.broadcast_to(cls, (batch, 1, self.size)).astype(self.dtype)
    x = jnp.concatenate([cls, x], axis=1) + position.astype(self.dtype)

    block_class = nn.remat(Block) if self.remat else Block
    drops = train and self.has_rng('dropout')
    for block in range(self.depth):
      x = block_class(
        self.num_heads,
        drop=self.drop_path * block / max(1, self.depth - 1) if drops else 0.0,
        dtype=self.dtype,
        name=f'block{block + 1}',
      )(x)
    features = _norm(name='norm', dtype=jnp.float32)(x[:, 0])
    return predict(features, self.num_classes, self.heads, train, _dense)


def named(name: str):
  match = re.fullmatch(r'vit_(tiny|small|base)_([1-9][0-9]{0,3})', name)
  if not match:
    return None
  return functools.partial(
    VisionTransformer, patch=int(match[2]), **_SIZES[match[1]]
  )
