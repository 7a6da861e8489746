"""Images a second that the host makes, and how long steps wait for them.

  python benchmarks/input_speed.py --seconds 5 --out input.json

The JPEGs are made here and resemble ImageNet's: 500 x 375 pixels and about
100 kB. They are prepared by TFDS and read as in training. "A core" divides by
the processor's time, so that other programs on the machine do not count; "a
second" is by the clock, with one core and with all. Settings are measured in
turns, and medians printed. The waiting is that of a small network on this
machine's devices: on an accelerator give it the work of a real step with
--width.
"""

import argparse
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flatmatch_jax.system.messages import count

VIEWS = ('weak', 'strong')
# Rows of a labeled and an unlabeled batch, and operations of RandAugment.
STREAMS = {
  'weak crops': (16, 0, 0),
  'weak and strong crops': (0, 16, 0),
  'weak and strong views': (0, 16, 3),
}


def photograph(generator):
  """An encoded image with structure of all sizes, as photographs have."""
  pixels = np.zeros((375, 500, 3))
  for cells in (2, 4, 8, 16, 32, 64, 128):
    shape = (cells * 3 // 4 + 1, cells + 1, 3)
    coarse = generator.integers(0, 256, shape).astype(np.uint8)
    layer = Image.fromarray(coarse).resize((500, 375), Image.BICUBIC)
    pixels += (np.asarray(layer) - 127.5) / cells**0.5
  pixels += generator.normal(scale=8, size=pixels.shape)
  file = io.BytesIO()
  image = Image.fromarray((pixels + 127.5).clip(0, 255).astype(np.uint8))
  image.save(file, 'JPEG', quality=95)
  return file.getvalue()


def prepare(folder, number):
  """Writes a dataset of `number` images; returns their mean size in bytes."""
  import tensorflow_datasets as tfds

  generator = np.random.default_rng(0)
  images = [photograph(generator) for _ in range(number)]

  # Not registered: it is made again at each call.
  class Photographs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      features = {
        'image': tfds.features.Image(encoding_format='jpeg'),
        'label': tfds.features.ClassLabel(num_classes=10),
      }
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
      )

    def _split_generators(self, _):
      return {
        split: self._generate_examples() for split in ('train', 'validation')
      }

    def _generate_examples(self):
      for i, image in enumerate(images):
        yield i, {'image': io.BytesIO(image), 'label': i % 10}

  tfds.display_progress_bar(False)
  Photographs(data_dir=folder).download_and_prepare()
  return sum(map(len, images)) / number


def open_data(folder):
  from flatmatch_jax.data import frames, records, sources, splits, streaming

  tfds = sources.import_tfds()
  builder = tfds.builder_from_directory(f'{folder}/photographs/1.0.0')
  train = records.open_split(builder, 'train')
  images = frames.Frames(train, 224)
  dataset = sources.Dataset(
    'photographs', images, train.labels, images, train.labels, tuple('x' * 10)
  )
  every = np.arange(len(train))
  return streaming.place(dataset, splits.Split(every, every, every[:0]))


def decode_speed(folder, stream, seconds):
  """Images of one stream a second of the clock, and of the processor."""
  from flatmatch_jax.data import streaming

  *sizes, operations = STREAMS[stream]
  batches = streaming.batches(
    open_data(folder), 0, 0, 10**6, *sizes, VIEWS, operations=operations
  )
  for _ in range(2):
    next(batches)
  began, used = time.perf_counter(), time.process_time()
  images = 0
  for batch in batches:
    images += len(batch.labeled['index']) + len(batch.unlabeled['index'])
    elapsed = time.perf_counter() - began
    if elapsed > seconds:
      return images / elapsed, images / (time.process_time() - used)
  raise AssertionError


def on_cores(cores, folder, stream, seconds):
  """`decode_speed` in a process of its own that may use `cores` only."""
  command = [sys.executable, __file__, '--folder', folder, '--stream', stream]
  result = subprocess.run(
    [*command, '--seconds', str(seconds)],
    check=True,
    stdout=subprocess.PIPE,
    preexec_fn=lambda: os.sched_setaffinity(0, cores),
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  return json.loads(result.stdout)


def waiting(folder, seconds, width, batch_size, ratio):
  """Seconds a step, and which share of them waits for input."""
  import jax
  import jax.numpy as jnp

  from flatmatch_jax.data import streaming
  from flatmatch_jax.data.prefetch import Prefetch
  from flatmatch_jax.system import sharding

  over = sharding.over_batch(sharding.make_mesh())
  sample = streaming.make_sampler(VIEWS, True, (0.5,) * 3, (0.25,) * 3, over)

  def loss(kernel, batch):
    images = [batch.labeled['weak'], *(batch.unlabeled[v] for v in VIEWS)]
    x = jax.lax.conv(
      jnp.moveaxis(jnp.concatenate(images), -1, 1), kernel, (4, 4), 'SAME'
    )
    return jnp.mean(jax.nn.relu(x) ** 2)

  @jax.jit
  def step(kernel, raw, number):
    batch = sample(raw, jax.random.fold_in(jax.random.key(0), number))
    return kernel - 0.01 * jax.grad(loss)(kernel, batch)

  kernel = jnp.ones((width, 3, 7, 7)) / 147
  source = streaming.batches(
    open_data(folder), 0, 0, 10**6, batch_size, ratio * batch_size, VIEWS
  )
  with Prefetch(source, over) as batches:
    for number in range(2):  # Compiles, and fills the queue.
      kernel = step(kernel, next(batches), number).block_until_ready()
    began, waited = time.perf_counter(), batches.waited
    for number in itertools.count(1):
      kernel = step(kernel, next(batches), number).block_until_ready()
      elapsed = time.perf_counter() - began
      if elapsed > seconds:
        return elapsed / number, (batches.waited - waited) / elapsed
  raise AssertionError


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--seconds', type=float, default=5, help='a measurement')
  parser.add_argument('--rounds', type=int, default=3, help='of measurements')
  parser.add_argument('--images', type=int, default=128)
  parser.add_argument('--batch_size', type=int, default=8)
  parser.add_argument('--ratio', type=int, default=7, help='of unlabeled')
  parser.add_argument('--width', type=int, default=16, help='of the network')
  parser.add_argument('--out', help='JSON file for the numbers')
  parser.add_argument('--folder', help=argparse.SUPPRESS)
  parser.add_argument('--stream', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.stream:  # The child of `on_cores`.
    print(json.dumps(decode_speed(args.folder, args.stream, args.seconds)))
    return

  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  cores = os.sched_getaffinity(0)
  with tempfile.TemporaryDirectory() as folder:
    size = prepare(folder, args.images)
    print(f'{size / 1000:.0f} kB an image, {count(len(cores), "core")}')
    settings = [(s, u) for s in STREAMS for u in ([min(cores)], sorted(cores))]
    speeds = np.median(
      [
        [on_cores(used, folder, s, args.seconds) for s, used in settings]
        for _ in range(args.rounds)
      ],
      axis=0,
    )
    rows = []
    for (stream, used), (speed, a_core) in zip(settings, speeds, strict=True):
      rows.append(
        {
          'stream': stream,
          'cores': len(used),
          'images_per_second': speed,
          'images_per_core_second': a_core,
        }
      )
      print(
        f'{stream}, {count(len(used), "core")}: {speed:.0f} images/s, '
        f'{a_core:.0f} a core',
        flush=True,
      )
    step, share = waiting(
      folder, args.seconds, args.width, args.batch_size, args.ratio
    )
  result = {
    'image_kilobytes': size / 1000,
    'decode': rows,
    'step_seconds': step,
    'waiting_share': share,
  }
  print(f'step {step:.3f} s, of which {100 * share:.0f}% wait for input')
  if args.out:
    pathlib.Path(args.out).write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
