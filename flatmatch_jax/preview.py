"""A picture of the augmentations.

  python -m flatmatch_jax.preview --config configs/cifar10.py --out aug.png

Above: each operation of RandAugment, its magnitude from the lowest on the left
to the highest on the right.
Below: training images, one column each, with weak and strong draws under them.
"""

import pathlib
import re
import runpy

from flatmatch_jax import data
from flatmatch_jax.data import pictures, splits
from flatmatch_jax.system import cli, files
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.types import UserError


def _config(name):
  """Loads 'file.py:key=value' without flags."""
  path, *arg = re.split(r'(?<=\.py):', name)
  if not pathlib.Path(path).is_file():
    raise UserError(f'There is no config file {path}.')
  return runpy.run_path(path)['get_config'](*arg)


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.preview',
    description='A picture of augmentations.',
  )
  parser.add_argument('--config', default='configs/digits.py')
  parser.add_argument('--data_dir', help='TFDS folder')
  parser.add_argument('--out', required=True, help='PNG file')
  args = parser.parse_args()
  files.check_target('--out', args.out)
  config = _config(args.config)
  config.data_dir = args.data_dir or config.data_dir
  config_lib.check_fields(config)
  dataset = data.from_config(config)
  index = splits.spread(dataset.train_labels, pictures.COLUMNS)
  images = dataset.train_images[index][:]
  rows = pictures.operations(images[0]) | pictures.pairs(
    images, config.pad, config.flip
  )
  with files.replacing(args.out) as file:
    pictures.sheet(rows).save(file, format='PNG')
  print(f'The picture is in {args.out}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
