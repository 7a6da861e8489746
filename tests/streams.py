"""Reads a small ImageNet as it is trained on, and classifies its test images.

python tests/streams.py FOLDER OUT --coordinator=… --num_processes=… …
"""

import sys
from unittest import mock

import jax
import numpy as np

from flatmatch_jax.data import splits, streaming
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.system import distributed, sharding
from flatmatch_jax.training import classify


class Mean:
  """Logits that are the means of colours, weighted."""

  def apply(self, variables, images, train):
    logits = images.mean((1, 2)) * variables['params']
    return type('Prediction', (), {'logits': logits})


def everything(folder, mesh):
  """All arrays, and how many images this process read for each part."""
  dataset = streaming.from_tfds('imagenet2012', folder, 16)
  labeled = np.array([1, 5, 9, 20])
  split = splits.Split(labeled, np.arange(30), labeled[:0])
  over_batch = sharding.over_batch(mesh)
  records = type(dataset.train_images.records)
  start, read = records.start, []

  def counted(self, rows):
    read.extend(rows)
    return start(self, rows)

  whole = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
  with mock.patch.object(records, 'start', counted):
    source = streaming.batches(
      streaming.place(dataset, split), 0, 0, 3, 4, 8, ('weak', 'strong'),
      rows=lambda size: sharding.local_rows(over_batch, size),
    )  # fmt: skip
    with Prefetch(source, over_batch) as batches:
      found = [
        np.asarray(x) for b in batches for x in jax.tree.leaves(whole(b))
      ]
    of_batches, read[:] = len(read), []
    run = classify.make_classifier(Mean(), (0.0,) * 3, (1.0,) * 3, 4, mesh)
    found += run((1.0, 5.0), {}, dataset.test_images)
  return found, (of_batches, len(read))


if __name__ == '__main__':
  folder, out, *told = sys.argv[1:]
  told = dict(flag.lstrip('-').split('=') for flag in told)
  distributed.connect(
    told['coordinator'], int(told['num_processes']), int(told['process_id'])
  )
  found, read = everything(folder, sharding.make_mesh())
  if distributed.is_first():
    np.savez(out, *found)
  print('read', *read)
