"""Classifies image files with a trained run.

  python -m flatmatch_jax.predict --workdir DIR IMAGES_OR_FOLDERS --out out.csv

Files are read by the rule of own images, data/images.py; after training on
ImageNet the margin of its test is cut off as well.
"""

import argparse
import contextlib
import csv
import pathlib
import sys

import numpy as np

from flatmatch_jax import cli, program
from flatmatch_jax.data import images
from flatmatch_jax.types import UserError
from flatmatch_jax.workdir import Workdir

_BATCH = 256


def find(paths: list[str]) -> list[pathlib.Path]:
  """The files named, and the images below the folders named, in order."""
  files: list[pathlib.Path] = []
  for path in map(pathlib.Path, paths):
    if path.is_dir():
      files += images.find(path).images
    elif path.is_file():
      files.append(path)
    else:
      raise UserError(f'{path} does not exist; give image files or folders.')
  if not files:
    raise UserError(
      f'No images in {", ".join(paths)}; looked for '
      f'{" ".join(images.EXTENSIONS)}.'
    )
  return files


def predict(
  run: program.Run, files: list[pathlib.Path], write_row
) -> list[str]:
  """Calls `write_row(file, class name, class, confidence)` for each image.

  Returns the complaints about files that could not be read.
  """
  state, complaints = run.state, []
  height, width, channels = run.dataset['image_shape']
  # Of an image that just covers it the test sees this share, in the centre.
  seen = run.dataset['test_share']
  whole = round(height / seen), round(width / seen)
  top, left = (whole[0] - height) // 2, (whole[1] - width) // 2
  names = run.dataset['class_names']
  for start in range(0, len(files), _BATCH):
    batch = files[start : start + _BATCH]
    pixels = np.zeros((len(batch), *whole, channels), np.uint8)
    unreadable = images.read_into(pixels, batch)
    pixels = pixels[:, top : top + height, left : left + width]
    complaints += [
      f'{batch[number]} cannot be read as an image: {reason}'
      for number, reason in unreadable.items()
    ]
    if len(unreadable) == len(batch):
      continue
    (probs,) = run.classify([state.ema_params], state.batch_stats, pixels)
    for number, (file, row) in enumerate(zip(batch, probs, strict=True)):
      if number not in unreadable:
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
