"""The networks by name. To add one: a file beside this one, and a line here."""

from types import ModuleType

import jax.numpy as jnp

from flatmatch_jax.models import fast, resnet, vit, wide_resnet
from flatmatch_jax.types import UserError, check_known

# By what their names start with. Each has NAMES, a text, and
# `named(name)`, which gives a function of `create`'s other arguments or None.
NETWORKS: dict[str, ModuleType] = {
  'fast': fast,
  'wrn': wide_resnet,
  'resnet': resnet,
  'vit': vit,
}
_DTYPES = {
  'float32': jnp.float32,
  'bfloat16': jnp.bfloat16,
  'float16': jnp.float16,
}


def with_layers(params) -> ModuleType | None:
  """The module of the network with these parameters, if it counts its layers.

  Then `depth(params)` is their number, and `layer(path, depth)` that of a
  parameter: 0 for the stem, up to `depth`, and `depth` + 1 for the heads.
  """
  return next((m for m in (vit, resnet) if m.depth(params)), None)


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

  Args:
    name: such as 'wrn_28_2'.
    num_classes: of the classifier.
    heads: extra linear heads as (name, size).
    dtype: of products and activations; parameters, statistics, pooling and
      heads stay float32.
    remat: compute each block again in the backward pass, to save memory.
  """
  check_known('dtype', dtype, _DTYPES)
  family = NETWORKS.get(name.partition('_')[0])
  if family is None or (make := family.named(name)) is None:
    known = '; '.join(network.NAMES for network in NETWORKS.values())
    raise UserError(f'There is no model {name!r}. Known: {known}.')
  return make(num_classes, heads=heads, dtype=_DTYPES[dtype], remat=remat)
