"""Classifies image files with a trained run.

  python -m flatmatch_jax.predict --workdir DIR IMAGES_OR_FOLDERS --out out.csv

Files are read by the rule of own images, data/images.py; after training on
ImageNet the margin of its test is cut off as well.
"""

import contextlib
import csv
import pathlib
import re
import sys

from flatmatch_jax.data import images
from flatmatch_jax.system import cli, files, messages
from flatmatch_jax.training import classifier as classifier_lib
from flatmatch_jax.training.classifier import BATCH, Classifier
from flatmatch_jax.types import UserError


def look_at(paths: list[str]) -> images.Found:
  """The files named, the images below the folders named, and other files."""
  found = images.Found([], {})
  for path in map(pathlib.Path, paths):
    if path.is_dir():
      inside = images.find(path)
      found.images.extend(inside.images)
      found.others.update(inside.others)
    elif path.is_file():
      found.images.append(path)
    else:
      raise UserError(f'{path} does not exist; give image files or folders.')
  for path in found.images:
    found.others.pop(path, None)  # Named by itself as well.
  if not found.images:
    raise UserError(
      f'No images in {", ".join(paths)}; looked for '
      f'{" ".join(images.EXTENSIONS)}.'
    )
  return found


def predict(
  classifier: Classifier, paths: list[pathlib.Path], write_row
) -> list[str]:
  """Calls `write_row(file, class name, class, confidence)` for each image.

  Returns the complaints about files that could not be read.
  """
  complaints = []
  names = classifier.class_names
  for start in range(0, len(paths), BATCH):
    batch = paths[start : start + BATCH]
    pixels, unreadable = classifier.read(batch)
    complaints += [
      f'{batch[number]} cannot be read as an image: {reason}'
      for number, reason in unreadable.items()
    ]
    if len(unreadable) == len(batch):
      continue
    probs = classifier.probabilities(pixels)
    for number, (file, row) in enumerate(zip(batch, probs, strict=True)):
      if number not in unreadable:
        best = int(row.argmax())
        write_row([str(file), names[best], best, f'{row[best]:.4f}'])
  return complaints


def main():
  parser = cli.Parser(description='Classifies image files.')
  model = parser.add_mutually_exclusive_group(required=True)
  model.add_argument('--workdir', help='folder of the run')
  model.add_argument(
    '--model', help='or an exported file, or a model of the package by name'
  )
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument('--out', help='CSV file; standard output if left out')
  parser.add_argument('paths', nargs='+', help='image files or folders')
  args = parser.parse_args()

  paths, others = look_at(args.paths)
  if args.out:
    files.check_target('--out', args.out)
  classifier = classifier_lib.load(args.workdir or args.model, args.checkpoint)
  if others:
    named = [f'{path} ({why})' for path, why in others.items()]
    messages.say(f'Skipped {len(named)} other files: {messages.some(named)}.')
  with _output(args.out) as write_row:
    write_row(['file', 'label', 'class', 'confidence'])
    complaints = predict(classifier, paths, write_row)
    for complaint in complaints:
      print(f'skipped: {messages.printable(complaint)}', file=sys.stderr)
    if len(complaints) == len(paths):
      raise UserError('None of the files could be read as an image.')
  if args.out:
    print(f'{len(paths) - len(complaints)} predictions are in {args.out}')


@contextlib.contextmanager
def _output(path: str | None):
  """A function that writes a row of the file, or of standard output.

  Names that a spreadsheet would compute with are kept from it: a file gets
  ./ in front, which is the same file, and a class an apostrophe.
  """

  def safe(row):
    file, label, *numbers = row
    file = f'./{file}' if _is_formula(file) else file
    return [file, f"'{label}" if _is_formula(label) else label, *numbers]

  if not path:
    writer = csv.writer(sys.stdout)
    yield lambda row: writer.writerow(
      messages.printable(str(value)) for value in safe(row)
    )
    return
  # A file's name may be any bytes.
  options = {'encoding': 'utf-8', 'errors': 'surrogateescape'}
  try:
    with files.replacing(path, mode='w', newline='', **options) as file:
      writer = csv.writer(file)
      yield lambda row: writer.writerow(safe(row))
  except OSError as error:
    raise UserError(f'Cannot write --out {path}: {error}.') from error


def _is_formula(text: str) -> bool:
  number = re.fullmatch(r'[+-][0-9.]+', text)
  return text[:1] in ('=', '+', '-', '@', '\t', '\r') and not number


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
