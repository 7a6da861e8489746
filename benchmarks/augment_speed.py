"""Images a second: our augmentations against Pillow on every core.

  python benchmarks/augment_speed.py --sizes 32 96 224 --out speed.json

With --profile also where our time goes: each operation on a batch that drew
nothing else, and what it costs in a batch that drew three of all fourteen.

Both sides do the same chain on the same kind of images. Pillow's processes
hold their images from the start and return nothing, so that neither starting
nor copying counts against it. Repeats alternate between the two.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import pathlib
import random
import statistics
import sys
import time

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

_images: list[Image.Image] = []  # Of one process of the pool.


def affine(image, *matrix):
  return image.transform(image.size, Image.AFFINE, matrix)


factor = lambda: random.uniform(0.05, 0.95)
third = lambda: random.uniform(-0.3, 0.3)
# The fourteen of TorchSSL.
OPERATIONS = (
  lambda image: ImageOps.autocontrast(image),
  lambda image: ImageEnhance.Brightness(image).enhance(factor()),
  lambda image: ImageEnhance.Color(image).enhance(factor()),
  lambda image: ImageEnhance.Contrast(image).enhance(factor()),
  lambda image: ImageOps.equalize(image),
  lambda image: image,
  lambda image: ImageOps.posterize(image, random.randint(4, 7)),
  lambda image: image.rotate(random.uniform(-30, 30)),
  lambda image: ImageEnhance.Sharpness(image).enhance(factor()),
  lambda image: affine(image, 1, third(), 0, 0, 1, 0),
  lambda image: affine(image, 1, 0, 0, third(), 1, 0),
  lambda image: ImageOps.solarize(image, random.uniform(0, 256)),
  lambda image: affine(image, 1, 0, third() * image.width, 0, 1, 0),
  lambda image: affine(image, 1, 0, 0, 0, 1, third() * image.height),
)


def pillow_cutout(image):
  width, height = image.size
  side = random.uniform(0, 0.5) * width
  x = int(max(0, random.uniform(0, width) - side / 2))
  y = int(max(0, random.uniform(0, height) - side / 2))
  box = (x, y, min(width, x + side), min(height, y + side))
  image = image.copy()
  ImageDraw.Draw(image).rectangle(box, (125, 123, 114))
  return image


def pillow_weak(image, pad):
  """Flip, reflection and crop by indices, which is faster than by np.pad."""
  if random.random() < 0.5:
    image = image.transpose(Image.FLIP_LEFT_RIGHT)
  pixels = np.asarray(image)
  height, width, _ = pixels.shape
  row = reflected(random.randint(-pad, pad), height)
  column = reflected(random.randint(-pad, pad), width)
  return pixels[row].take(column, axis=1)


@functools.cache
def reflected(shift, size):
  index = np.abs(np.arange(shift, shift + size))
  return np.minimum(index, 2 * (size - 1) - index)


def pillow_strong(image, pad):
  for operation in random.choices(OPERATIONS, k=3):
    image = operation(image)
  return pillow_weak(pillow_cutout(image), pad)


def hold(images):
  _images[:] = map(Image.fromarray, images)


def pillow_pass(kind, pad, share):
  """Augments this process's share of the images, into one array."""
  function = {'weak': pillow_weak, 'strong': pillow_strong}[kind]
  start, stop = share
  np.stack([function(image, pad) for image in _images[start:stop]])


def seconds(function):
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def compare(size, batch, repeats, processes, kind):
  """The median seconds of ours and of Pillow's."""
  import jax  # After the fork of the caller, whose children must not have it.

  from flatmatch_jax.data import augment

  images = photographs(size, batch)
  pad = size // 8
  function = {'weak': augment.weak, 'strong': augment.strong}[kind]
  ours = jax.jit(lambda key, images: function(key, images, pad, True))
  device_images = jax.device_put(images)
  keys = jax.random.split(jax.random.key(0), repeats + 1)
  ours(keys[-1], device_images).block_until_ready()
  edges = np.linspace(0, batch, processes + 1).astype(int)
  shares = [(kind, pad, share) for share in itertools.pairwise(edges)]
  times = []
  # Spawned: a fork would copy the threads of JAX in whatever state they are.
  context = multiprocessing.get_context('spawn')
  with context.Pool(processes, hold, (images,)) as pool:
    theirs = lambda: pool.starmap(pillow_pass, shares, chunksize=1)
    theirs()
    for key in keys[:-1]:
      run = lambda key=key: ours(key, device_images).block_until_ready()
      times.append((seconds(run), seconds(theirs)))
  return [statistics.median(column) for column in zip(*times, strict=True)]


def profile(size, batch, repeats):
  """Prints the parts of strong; repeats alternate between them."""
  import jax
  import jax.numpy as jnp

  from flatmatch_jax.data import augment, randaugment

  key = jax.random.key(0)
  images = jnp.asarray(photographs(size, batch))
  pixels = randaugment.pack(images)
  draws = {}
  for number, name in enumerate(randaugment.OPERATIONS):
    low, high, _ = randaugment.RANGES[name]
    draws[name] = (
      jnp.full(batch, number),
      jax.random.randint(key, (batch,), low, high + 1),
    )
  one = jax.jit(lambda x, *draw: randaugment.apply_packed(x, *draw, 3))
  parts = {
    name: functools.partial(one, pixels, *draw) for name, draw in draws.items()
  }
  weak = jax.jit(lambda x: augment._weak(key, x, size // 8, True))
  cut = augment.draw_cutout(key, batch)
  cutout = jax.jit(lambda x: augment._cutout(x, *cut, 3))
  parts['pack'] = functools.partial(jax.jit(randaugment.pack), images)
  parts['cutout'] = functools.partial(cutout, pixels)
  parts['weak'] = functools.partial(weak, pixels)
  unpack = jax.jit(lambda x: randaugment.unpack(x, 3))
  parts['unpack'] = functools.partial(unpack, pixels)
  times = {name: [] for name in parts}
  for repeat in range(repeats + 1):
    for name, part in parts.items():
      spent = seconds(lambda part=part: jax.block_until_ready(part()))
      if repeat:  # The first compiles.
        times[name].append(spent)
  print(f'{"":>14} {"ns/pixel":>9} {"in strong":>9}   at {size}x{size}')
  for name, spent in times.items():
    cost = statistics.median(spent) / batch / size**2 * 1e9
    share = 3 / len(draws) if name in draws else 1
    print(f'{name:>14} {cost:9.2f} {cost * share:9.2f}', flush=True)


def photographs(size, batch):
  """Noise of neighbouring pixels that resemble each other."""
  generator = np.random.default_rng(0)
  coarse = generator.integers(0, 256, (batch, 8, 8, 3)).astype(np.uint8)
  resize = lambda x: Image.fromarray(x).resize((size, size), Image.BICUBIC)
  return np.stack([np.asarray(resize(image)) for image in coarse])


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--sizes', type=int, nargs='+', default=[32])
  parser.add_argument('--batch', type=int, default=448)
  parser.add_argument('--repeats', type=int, default=15)
  parser.add_argument(
    '--processes', type=int, default=multiprocessing.cpu_count()
  )
  parser.add_argument('--out', help='JSON file for the rows of strong')
  parser.add_argument('--profile', action='store_true')
  args = parser.parse_args()
  rows = []
  print(f'batch {args.batch}, Pillow in {args.processes} processes')
  print(f'{"":>6} {"size":>5} {"ours/s":>10} {"Pillow/s":>10} {"ratio":>6}')
  for size in args.sizes:
    for kind in ('weak', 'strong'):
      ours, theirs = compare(
        size, args.batch, args.repeats, args.processes, kind
      )
      row = {
        'size': size,
        'augmentation': kind,
        'images_per_second': args.batch / ours,
        'pillow_images_per_second': args.batch / theirs,
        'ratio': theirs / ours,
      }
      rows.append(row)
      print(
        f'{kind:>6} {size:5d} {row["images_per_second"]:10.0f} '
        f'{row["pillow_images_per_second"]:10.0f} {row["ratio"]:6.1f}',
        flush=True,
      )
  if args.profile:
    for size in args.sizes:
      profile(size, args.batch, args.repeats)
  if args.out:
    pathlib.Path(args.out).write_text(json.dumps(rows, indent=2) + '\n')


if __name__ == '__main__':
  main()
