"""Are images that the labeling page shows first better to label than others?

  python benchmarks/label_choice.py --config digits.py:labels=40
  python benchmarks/label_choice.py --config cifar10_fast.py:labels=250 \
    --data_dir DIR

Trains on as many labels as the config has: `chosen` labels the first images of
the page's order, `random` those of a random one, and `balanced` is the usual
draw, which knows the classes. An image that is the first of its class in an
order is labeled in any case. Prints test errors by seed; finished runs are not
repeated.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import study_report
from flatmatch_jax import data
from flatmatch_jax.data import choice
from flatmatch_jax.label import rank
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, startup
from flatmatch_jax.training import load, loop

ORDERS = ('chosen', 'random', 'balanced')


def thumbnail(image: np.ndarray) -> np.ndarray:
  picture = Image.fromarray(image.squeeze()).convert('RGB')
  side = (choice.SIDE, choice.SIDE)
  return np.asarray(picture.resize(side, Image.Resampling.BICUBIC))


def order_of(dataset, name: str, seed: int) -> np.ndarray:
  """Training images in the order in which they would be labeled."""
  drawn = np.random.default_rng(seed).permutation(len(dataset.train_labels))
  if name == 'random':
    return drawn
  drawn = drawn[: rank.SIZES[-1]]
  pixels = np.stack([thumbnail(dataset.train_images[i]) for i in drawn])
  return drawn[choice.spread(choice.embed(pixels))]


def first_of(order: np.ndarray, labels: np.ndarray, number: int) -> list[int]:
  """The first `number` of an order, and in any case one of each class."""
  _, firsts = np.unique(labels[order], return_index=True)
  rest = np.setdiff1d(np.arange(len(order)), firsts)
  return sorted(order[np.append(firsts, rest[: number - len(firsts)])].tolist())


def error_of(args, name: str, seed: int) -> float:
  """The last test error of a run with these labels."""
  file, _, variant = args.config.partition(':')
  parts = filter(None, [variant, f'seed={seed},split_seed={seed}'])
  config = load.load_config(file, ','.join(parts))
  config.data_dir = args.data_dir
  if args.steps:
    config.steps = args.steps
  out = pathlib.Path(args.out)
  if name != 'balanced':
    dataset = data.from_config(config)
    order = order_of(dataset, name, seed)
    index = first_of(order, dataset.train_labels, config.labels)
    path = out / f'{name}-{seed}.json'
    path.write_text(json.dumps(index))
    config.labels_file = str(path)
  startup.use_cores(config)
  workdir = out / f'{name}-{seed}'
  loop.train_and_evaluate(config, str(workdir))
  return Workdir(str(workdir)).read('result.json')['error_last']


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='digits.py', help='in configs/')
  parser.add_argument('--data_dir', default='')
  parser.add_argument('--seeds', default='0,1,2,3,4')
  parser.add_argument('--steps', type=int, help="the config's if left out")
  parser.add_argument('--out', default='runs/label_choice')
  args = parser.parse_args()
  pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
  seeds = [int(seed) for seed in args.seeds.split(',')]
  errors = {
    name: [error_of(args, name, seed) for seed in seeds] for name in ORDERS
  }
  print('| labels | test error % by seed | mean ± std | minus random (95%) |')
  print('|---|---|---|---|')
  for name, row in errors.items():
    pairs = zip(row, errors['random'], strict=True)
    print(
      f'| {name} | {", ".join(f"{error:.2f}" for error in row)} | '
      f'{study_report.spread(row)} | '
      f'{study_report.difference([a - b for a, b in pairs])} |'
    )


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
