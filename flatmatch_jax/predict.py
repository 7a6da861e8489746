"""Classifies image files with a trained run.

  python -m flatmatch_jax.predict --workdir DIR IMAGES_OR_FOLDERS --out out.csv

An image of another size is scaled until it just covers the network's input,
and cut to its centre; colours become grey where the network is grey.
"""

import argparse
import contextlib
import csv
import pathlib
import sys

import numpy as np
from PIL import Image, ImageOps

from flatmatch_jax import cli, program
from flatmatch_jax.types import UserError
from flatmatch_jax.workdir import Workdir

EXTENSIONS = ('.png', '.jpg', '.jpeg', '.webp', '.bmp', '.gif', '.tif', '.tiff')
_BATCH = 256


def find(paths: list[str]) -> list[pathlib.Path]:
  """The files named, and the images below the folders named, in order."""
  files: list[pathlib.Path] = []
  for path in map(pathlib.Path, paths):
    if path.is_dir():
      inside = sorted(p for p in path.rglob('*') if p.is_file())
      files += [p for p in inside if p.suffix.lower() in EXTENSIONS]
    elif path.is_file():
      files.append(path)
    else:
      raise UserError(f'{path} does not exist; give image files or folders.')
  if not files:
    raise UserError(
      f'No images in {", ".join(paths)}; looked for {" ".join(EXTENSIONS)}.'
    )
  return files


def read(path: pathlib.Path, shape: tuple[int, int, int]) -> np.ndarray:
  """An image file as uint8 of `shape` [H, W, C]; UserError if unreadable."""
  height, width, channels = shape
  try:
    with Image.open(path) as file:
      image: Image.Image = ImageOps.exif_transpose(file)
      if image.mode.startswith('I;16') or image.mode == 'I':
        # Pillow clips 16 bits to 255 when it converts; keep the upper eight.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
      if image.mode in ('P', 'PA', 'LA', 'RGBA'):
        image = _on_white(image)
      image = image.convert('L' if channels == 1 else 'RGB')
      if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
      return np.asarray(image, np.uint8).reshape(shape)
  except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
    raise UserError(f'{path} cannot be read as an image: {e}') from e


def _on_white(image):
  """Transparent parts show white paper."""
  image = image.convert('RGBA')
  paper = Image.new('RGBA', image.size, 'white')
  return Image.alpha_composite(paper, image)


def predict(
  run: program.Run, files: list[pathlib.Path], write_row
) -> list[str]:
  """Calls `write_row(file, class name, class, confidence)` for each image.

  Returns the complaints about files that could not be read.
  """
  complaints = []
  shape = tuple(run.dataset['image_shape'])
  names = run.dataset['class_names']
  for start in range(0, len(files), _BATCH):
    images, good = [], []
    for file in files[start : start + _BATCH]:
      try:
        images.append(read(file, shape))
        good.append(file)
      except UserError as error:
        complaints.append(str(error))
    if not images:
      continue
    state = run.state
    probs = run.classify(state.ema_params, state.batch_stats, np.stack(images))
    for file, row in zip(good, probs, strict=True):
      best = int(row.argmax())
      write_row([str(file), names[best], best, f'{row[best]:.4f}'])
  return complaints


def main():
  parser = argparse.ArgumentParser(description='Classifies image files.')
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--out', help='CSV file; standard output if left out')
  parser.add_argument('paths', nargs='+', help='image files or folders')
  args = parser.parse_args()

  files = find(args.paths)
  if args.out and pathlib.Path(args.out).is_dir():
    raise UserError(f'--out {args.out} is a folder; name a CSV file.')
  run = program.load_run(Workdir(args.workdir), args.checkpoint)
  temporary = pathlib.Path(f'{args.out}.tmp')
  try:
    output = temporary.open('w', newline='') if args.out else sys.stdout
  except OSError as error:
    raise UserError(f'Cannot write --out {args.out}: {error}.') from error
  with output if args.out else contextlib.nullcontext():
    writer = csv.writer(output)
    writer.writerow(['file', 'label', 'class', 'confidence'])
    complaints = predict(run, files, writer.writerow)
  for complaint in complaints:
    print(f'skipped: {complaint}', file=sys.stderr)
  if len(complaints) == len(files):
    if args.out:
      temporary.unlink()
    raise UserError('None of the files could be read as an image.')
  if args.out:
    temporary.replace(args.out)
    print(f'{len(files) - len(complaints)} predictions are in {args.out}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
