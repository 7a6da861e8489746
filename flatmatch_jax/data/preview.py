"""A picture of the augmentations.

  python -m flatmatch_jax.data.preview --config configs/cifar10.py --out aug.png

Above: each operation of RandAugment, its magnitude from the lowest on the left
to the highest on the right.
Below: training images, one column each, with weak and strong draws under them.
"""

import functools
import pathlib
import re
import runpy

import jax
import numpy as np
from PIL import Image, ImageDraw

from flatmatch_jax import config as config_lib
from flatmatch_jax import data
from flatmatch_jax.data import augment, randaugment, splits
from flatmatch_jax.system import cli, files
from flatmatch_jax.types import UserError

COLUMNS = 10
LABEL_WIDTH = 96
GAP = 2


def operations(image: np.ndarray) -> dict[str, np.ndarray]:
  """Each operation on one image at COLUMNS magnitudes over its range."""
  batch = np.repeat(image[None], COLUMNS, 0)
  rows = {}
  apply = jax.jit(randaugment.apply)
  for number, name in enumerate(randaugment.OPERATIONS):
    low, high, _ = randaugment.RANGES[name]
    magnitude = np.linspace(low, high, COLUMNS).round().astype(np.int32)
    operation = np.full(COLUMNS, number, np.int32)
    rows[name] = np.asarray(apply(batch, operation, magnitude))
  return rows


def pairs(
  images: np.ndarray, pad: int, flip: bool, operations: int = 3
) -> dict[str, np.ndarray]:
  """The images, two weak and three strong draws of each."""
  rows = {'image': images}
  strong = functools.partial(augment.strong, operations=operations)
  for name, make, number in (('weak', augment.weak, 2), ('strong', strong, 3)):
    draw = jax.jit(make, static_argnums=(2, 3))
    for i in range(1, number + 1):
      rows[f'{name} {i}'] = np.asarray(
        draw(jax.random.key(i), images, pad, flip)
      )
  return rows


def sheet(rows: dict[str, np.ndarray], size: int = 48) -> Image.Image:
  """Lays rows of uint8 images under each other, their names beside them."""
  step = size + GAP
  width = LABEL_WIDTH + COLUMNS * step
  page = Image.new('RGB', (width, len(rows) * step), 'white')
  draw = ImageDraw.Draw(page)
  for y, (name, images) in enumerate(rows.items()):
    draw.text((4, y * step + size // 2 - 6), name, fill='black')
    for x, image in enumerate(images[:COLUMNS]):
      tile = Image.fromarray(image.squeeze())
      tile = tile.resize((size, size), Image.Resampling.NEAREST)
      page.paste(tile, (LABEL_WIDTH + x * step, y * step))
  return page


def _config(name):
  """Loads 'file.py:key=value' without flags."""
  path, *arg = re.split(r'(?<=\.py):', name)
  if not pathlib.Path(path).is_file():
    raise UserError(f'There is no config file {path}.')
  return runpy.run_path(path)['get_config'](*arg)


def main():
  parser = cli.Parser(description='A picture of augmentations.')
  parser.add_argument('--config', default='configs/digits.py')
  parser.add_argument('--data_dir', help='TFDS folder')
  parser.add_argument('--out', required=True, help='PNG file')
  args = parser.parse_args()
  files.check_target('--out', args.out)
  config = _config(args.config)
  config.data_dir = args.data_dir or config.data_dir
  config_lib.check_fields(config)
  dataset = data.from_config(config)
  images = dataset.train_images[splits.spread(dataset.train_labels, COLUMNS)][:]
  rows = operations(images[0]) | pairs(images, config.pad, config.flip)
  with files.replacing(args.out) as file:
    sheet(rows).save(file, format='PNG')
  print(f'The picture is in {args.out}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
