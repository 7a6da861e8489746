"""A few images in the files of ImageNet, as TFDS writes them."""

import io

import numpy as np
from PIL import Image
import pytest

from flatmatch_jax.data import sources

COUNTS = {'train': 30, 'validation': 7}


SIZES = ((40, 60), (60, 40), (50, 50), (24, 90), (8, 9))


def encode(image, kind='JPEG', **kwargs):
  file = io.BytesIO()
  image.save(file, kind, **kwargs)
  return file.getvalue()


def picture(split, i):
  """The encoded image `i` of a split: all sizes and kinds, no two the same."""
  rng = np.random.RandomState(1000 * len(split) + i)
  colour = rng.randint(40, 216, 3)  # By which a crop can be recognized.
  coarse = (colour + rng.randint(-40, 41, (4, 4, 3))).astype(np.uint8)
  image = Image.fromarray(coarse).resize(SIZES[i % len(SIZES)], Image.BILINEAR)
  if i % 10 == 7:
    return encode(image.convert('L'))
  if i % 10 == 8:
    return encode(image.convert('CMYK'))
  if i % 10 == 9:
    return encode(image, 'PNG')
  return encode(image, quality=95)


def label_of(split, i):
  return (7 * i + len(split)) % 10


def prepare(folder, counts=COUNTS, image=picture, num_shards=3, **kwargs):
  """Writes a small 'imagenet2012' with the real builder of TFDS."""
  tfds = sources.import_tfds()
  builder = tfds.builder('imagenet2012', data_dir=folder, **kwargs)
  examples = {
    split: [
      (
        i,
        {
          'file_name': f'{split}_{i}.JPEG',
          'image': io.BytesIO(image(split, i)),
          'label': label_of(split, i),
        },
      )
      for i in range(count)
    ]
    for split, count in counts.items()
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      type(builder),
      '_split_generators',
      lambda self, *args, **kwargs: {k: iter(v) for k, v in examples.items()},
    )
    tfds.display_progress_bar(False)
    builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(num_shards=num_shards)
    )
  return builder
