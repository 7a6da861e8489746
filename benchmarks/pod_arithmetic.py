"""What the paper's runs ask of 8, 64 and 512 chips: arithmetic, no measurement.

  python benchmarks/pod_arithmetic.py [--chip v5e] [--method flatmatch]

docs/speed.md draws conclusions from its table. The shapes are those of the real
networks, traced; what is assumed stands in the constants below. A step takes as
long as the resource that takes longest, as if all overlapped.
"""

import argparse
import math
import os
import pathlib
import sys
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.chips import CHIPS, Chip, batch_factor
from flatmatch_jax import data, models
from flatmatch_jax.paper import cells, cost
from flatmatch_jax.step import recipes

# Shares of the published peaks that a good program gets.
OF_FLOPS = 0.4
OF_BANDWIDTH = 0.7
OF_LINKS = 0.7
# Seconds that a collective takes however small it is, a hop of the torus.
HOP = 1e-6
# How often an output of a convolution or matrix passes to or from memory in a
# forward pass: written, read, and both at times once more. A backward pass is
# two of these. The compiler (docs/tpu_compile.json) says 3.4 to 3.7, with the
# padding of `spread`.
MOVES = 3.5
LANES = 128  # The innermost dimension of an array takes whole units of these.
BYTES = 2  # Of an activation: bfloat16.
# Of a host, for each of its chips: 224 virtual cores for the 8 of a v5e.
CORES = 28
# Weak crops, and pairs of weak and strong views, that a core makes in a second:
# docs/speed.md, `benchmarks/input_speed.py`.
CROPS, PAIRS = 490, 290
# Seconds of an image for which a host's other threads wait, at most.
LOCKED = 0.26e-3
STREAMED = ('imagenet', 'imagenet30')
COUNTS = 8, 64, 512


class Network(NamedTuple):
  """What a network's shapes say."""

  params: int
  stats: int  # Means and variances of all BatchNorms.
  norms: int  # BatchNorms that are used.
  outputs: int  # Numbers that convolutions and matrices give, an image.
  padded: int  # The same with channels in whole lanes.


def network(config) -> Network:
  """Traces the config's network on one image."""
  _, shape = cost.IMAGES[config.dataset]
  classes = data.SOURCES[config.dataset].num_classes or 0
  model = models.create(config.model, classes)
  image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  key = jax.eval_shape(jax.random.key, 0)
  init = lambda key, image: model.init(key, image, train=True)
  variables = jax.eval_shape(init, key, image)
  apply = lambda variables, image: model.apply(variables, image, train=False)
  traced = jax.make_jaxpr(apply)(variables, image)
  count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
  stats = count(variables.get('batch_stats', {}))
  found = list(_operations(traced.jaxpr))
  outputs = [
    shape
    for name, shape in found
    if name in ('conv_general_dilated', 'dot_general')
  ]
  return Network(
    params=count(variables['params']),
    stats=stats,
    norms=sum(name == 'rsqrt' for name, _ in found) if stats else 0,
    outputs=sum(map(math.prod, outputs)),
    padded=sum(_padded(shape) for shape in outputs),
  )


def _padded(shape):
  *others, channels = shape
  return math.prod(others) * math.ceil(channels / LANES) * LANES


def _operations(jaxpr):
  """Yields names and shapes of all operations, also of inner programs."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name, equation.outvars[0].aval.shape
    for inner in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, 'jaxpr')
    ):
      if hasattr(inner, 'jaxpr'):
        yield from _operations(inner.jaxpr)


def spread(net: Network, images: float) -> float:
  """How many times their bytes the activations of a chip's images take.

  Images or channels are innermost, whichever fills the lanes better.
  """
  by_images = math.ceil(images / LANES) * LANES / images
  return min(by_images, net.padded / net.outputs)


class Step(NamedTuple):
  """What one step of all chips asks for, and a chip holds."""

  flops: float
  accessed: float  # Bytes from and to memory, of all chips.
  held: float  # Bytes in a chip's memory.
  reduced: float  # Bytes of a chip's all-reduces.
  collectives: int
  decoded: float  # Core-seconds of the hosts.
  images: int  # That the hosts decode.


def step(config, net: Network, chips: int) -> Step:
  """A step of the config's batch, which divides by the chips."""
  method, recipe = recipes.parse(config.method)
  worth = cost.images_per_step(config, method, recipe)
  under = recipe != 'plain'
  remembers = recipe in ('flatmatch_e', 'flatmatch_last')
  labeled, unlabeled = config.batch_size, config.unlabeled_batch_size
  # Parameters, gradient and momentum read and written, and the average; under
  # FlatMatch also ε and a second gradient; and M, measured, looked at, kept.
  arrays = 7 + 4 * under + 5 * remembers
  number, shape = cost.IMAGES[config.dataset]
  streamed = config.dataset in STREAMED
  saved = BYTES * net.outputs * max(labeled, unlabeled) / chips
  held = 4 * net.params * (5 + under + remembers)
  if not streamed:
    held += number * math.prod(shape)
  # The gradients of both trained views are reduced each by itself, in the type
  # of activations. Moments of views that wait for nothing go together: forward
  # and backward, and under FlatMatch once more, since ε comes in between, if it
  # is not known before.
  gradients, passes = (2, 4) if under and not remembers else (1, 2)
  padding = spread(net, unlabeled / chips)
  return Step(
    flops=2 * cost.MACS[config.model] * worth,
    accessed=BYTES * MOVES * net.outputs * worth * padding
    + 4 * net.params * arrays * chips,
    held=held + padding * saved,
    reduced=(2 * BYTES * net.params + 4 * 4 * net.stats) * (chips > 1),
    collectives=(gradients + passes * net.norms) * (chips > 1),
    decoded=streamed * (labeled / CROPS + unlabeled / PAIRS),
    images=streamed * (labeled + unlabeled),
  )


def times(chip: Chip, asked: Step, chips: int) -> dict[str, float]:
  """Seconds of a step by each resource."""
  hops = 2 * math.isqrt(chips)  # Along both axes of a square and back.
  return {
    'compute': asked.flops / chips / (OF_FLOPS * chip.flops),
    'memory': asked.accessed / chips / (OF_BANDWIDTH * chip.bandwidth),
    'links': 2 * asked.reduced / (OF_LINKS * chip.links)
    + asked.collectives * hops * HOP,
    'input': max(
      asked.decoded / (CORES * chips),
      LOCKED * asked.images / max(1, chips // 8),
    ),
  }


def row(config, net: Network, chip: Chip, chips: int) -> list[str]:
  """A line of the table."""
  config = config.copy_and_resolve_references()
  factor = batch_factor((config.batch_size, config.unlabeled_batch_size), chips)
  config.batch_size *= factor
  config.unlabeled_batch_size *= factor
  asked = step(config, net, chips)
  spent = times(chip, asked, chips)
  binds = max(spent, key=lambda name: spent[name])
  seconds = spent[binds]
  hosts = max(1, chips // 8)
  ms = lambda name: f'{1e3 * spent[name]:.2f}'
  return [
    config.dataset,
    config.model,
    str(chips),
    f'{config.batch_size} + {config.unlabeled_batch_size}',
    f'{asked.flops / chips / 1e9:,.0f}',
    ms('compute'),
    ms('memory'),
    f'{asked.held / 1e9:.2f}',
    f'{asked.reduced / 1e6:.0f}',
    ms('links'),
    f'{asked.images / seconds / hosts:,.0f}' if asked.images else '–',
    ms('input') if asked.images else '–',
    binds + (', batch' if factor > 1 else ''),
    f'{config.steps * seconds / 86400:.2g}',
    f'{config.steps * seconds / 86400 / factor:.2g}' if factor > 1 else '',
  ]


HEAD = (
  'dataset',
  'network',
  'chips',
  'batch',
  'GFLOP',
  'compute ms',
  'memory ms',
  'held GB',
  'all-reduced MB',
  'links ms',
  'images/s a host',
  'input ms',
  'binds',
  'days',
  'days, same images',
)


def configurations(method: str):
  """One config for each dataset and network of the paper's tables."""
  found = {}
  for table in ('table1', 'imagenet30', 'imagenet'):
    for cell in cells.runs(table):
      config = cell._replace(method=method).config()
      found.setdefault((config.dataset, config.model), config)
  return list(found.values())


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--chip', choices=CHIPS, default='v5e')
  parser.add_argument('--method', default='flatmatch')
  args = parser.parse_args()
  lines = [HEAD, ['---'] * len(HEAD)]
  for config in configurations(args.method):
    net = network(config)
    for chips in COUNTS:
      lines.append(row(config, net, CHIPS[args.chip], chips))
  for line in lines:
    print(f'| {" | ".join(line)} |')


if __name__ == '__main__':
  main()
