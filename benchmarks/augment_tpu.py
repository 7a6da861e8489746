"""What the TPU compiler makes of the strong augmentation, without a TPU.

  pip install libtpu
  python benchmarks/augment_tpu.py --sizes 32 96

Compiles each part for a whole batch and prints the bytes it accesses, the
cycles the compiler expects where it says so (not for gathers and scatters),
and the operations that are dear there. A kind of RandAugment is weighted with
how many of a batch's three times `batch` operations are of it.
"""

import argparse
import os
import pathlib
import re
import sys

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
from jax.experimental import topologies
import jax.numpy as jnp

from flatmatch_jax.data import augment, randaugment


def parts(size, batch):
  """Yields name, weight, function and the shapes it takes."""
  array = jax.ShapeDtypeStruct
  images = array((batch, size, size, 3), jnp.uint8)
  pixels = array((batch, size, size), jnp.int32)
  rows = array((batch, size * size), jnp.int32)
  drawn = array((batch,), jnp.int32)
  centre = array((batch, 2), jnp.int32)
  shape = size, size, 3
  for names, prepare, finish in randaugment.KINDS:

    def one(rows, *draws, prepare=prepare, finish=finish):
      return finish(rows, shape, *prepare(rows, *draws, shape))

    weight = 3 * len(names) / len(randaugment.OPERATIONS)
    yield ', '.join(names), weight, one, (rows, drawn, drawn)
  yield 'pack', 1, randaugment.pack, (images,)
  cutout = lambda *x: augment._cutout(*x, 3)
  yield 'cutout', 1, cutout, (pixels, centre, drawn)
  weak = lambda x: augment._weak(jax.random.key(0), x, size // 8, True)
  yield 'weak', 1, weak, (pixels,)
  yield 'unpack', 1, lambda x: randaugment.unpack(x, 3), (pixels,)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--sizes', type=int, nargs='+', default=[32])
  parser.add_argument('--batch', type=int, default=448)
  parser.add_argument('--topology', default='v5e:2x2')
  args = parser.parse_args()
  device = topologies.get_topology_desc(args.topology, 'tpu').devices[0]
  here = jax.sharding.SingleDeviceSharding(device)
  for size in args.sizes:
    total = cycles_total = 0
    print(f'{args.batch}x{size}x{size}: weight, MB, Mcycles, dear operations')
    for name, weight, function, shapes in parts(size, args.batch):
      place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
      compiled = jax.jit(function).lower(*map(place, shapes)).compile()
      text = compiled.as_text()
      megabytes = compiled.cost_analysis()['bytes accessed'] / 1e6
      found = re.findall(r'"estimated_cycles":"(\d+)"', text)
      cycles = sum(map(int, found)) / 1e6
      dear = re.findall(r' (gather|scatter|sort|while)\(', text)
      print(f'{weight:5.2f} {megabytes:9.1f} {cycles:7.2f} {dear} {name}')
      total += weight * megabytes
      cycles_total += weight * cycles
    print(f'weighted sum: {total:.0f} MB, {cycles_total:.2f} Mcycles')


if __name__ == '__main__':
  main()
