"""Classifies image files with a trained run.

  python -m flatmatch_jax.predict --workdir DIR IMAGES_OR_FOLDERS --out out.csv
  python -m flatmatch_jax.predict --model cifar10 photo.jpg

Files are read by the rule of own images, data/images.py; after training on
ImageNet the margin of its test is cut off as well. A table has a row for each
image; with --out out.jsonl each line is an object. --top 5 adds the next best
classes, --probabilities all of them.
"""

from collections.abc import Sequence
import contextlib
import csv
import json
import pathlib
import re
import sys

import numpy as np
from tqdm import tqdm

from flatmatch_jax.data import images
from flatmatch_jax.system import cli, files, messages
from flatmatch_jax.training import classifier as classifier_lib
from flatmatch_jax.training import load
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
  classifier: Classifier, paths: list[pathlib.Path], write, complain
) -> None:
  """Calls `write(path, probabilities [K])` for each image, in order.

  And `complain(path, why)` for each that cannot be read.
  """
  for start in range(0, len(paths), BATCH):
    batch = paths[start : start + BATCH]
    pixels, unreadable = classifier.read(batch)
    readable = [row for row in range(len(batch)) if row not in unreadable]
    probs = classifier.probabilities(pixels[readable])
    found = dict(zip(readable, probs, strict=True))
    for row, path in enumerate(batch):
      if row in found:
        write(path, found[row])
      else:
        complain(path, unreadable[row])


class Table:
  """What is written of an image: a row of texts, or an object for JSON."""

  def __init__(self, names: Sequence[str], top: int, whole: bool):
    if not 1 <= top <= len(names):
      raise UserError(
        f'--top {top} must be from 1 to {len(names)}, the number of classes of '
        'the run.'
      )
    self._names, self._top, self._whole = names, top, whole

  def _best(self, probs):
    """Class names, classes and probabilities, the best first."""
    order = np.argsort(-probs, kind='stable')[: self._top].tolist()
    return [(self._names[k], k, float(probs[k])) for k in order]

  def header(self) -> list[str]:
    ends = ['', *(f'_{rank}' for rank in range(2, self._top + 1))]
    columns = ('label', 'class', 'confidence')
    best = [column + end for end in ends for column in columns]
    whole = [f'p_{name}' for name in self._names] if self._whole else []
    return ['file', *best, *whole]

  def row(self, path: pathlib.Path, probs) -> list[str]:
    """Names that a spreadsheet would compute with are kept from it: a file gets
    ./ in front, which is the same file, and a class an apostrophe."""
    row = [f'./{path}' if _is_formula(str(path)) else str(path)]
    for name, label, confidence in self._best(probs):
      name = f"'{name}" if _is_formula(name) else name
      row += [name, str(label), f'{confidence:.4f}']
    return row + [f'{p:.4f}' for p in probs if self._whole]

  def item(self, path: pathlib.Path, probs) -> dict:
    keys = ('label', 'class', 'confidence')
    best = [
      dict(zip(keys, (name, label, round(confidence, 6)), strict=True))
      for name, label, confidence in self._best(probs)
    ]
    item = {'file': str(path), **best[0]}
    if self._top > 1:
      item['top'] = best
    if self._whole:
      values = np.round(probs.astype(float), 6).tolist()
      item['probabilities'] = dict(zip(self._names, values, strict=True))
    return item


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.predict',
    description='Classifies image files.',
  )
  model = parser.add_mutually_exclusive_group(required=True)
  model.add_argument('--workdir', help='folder of the run')
  model.add_argument(
    '--model',
    help='or a file of `python -m flatmatch_jax.export`; cifar10 comes with '
    'the package',
  )
  parser.add_argument(
    '--checkpoint', default='latest', help='latest (default) or best'
  )
  parser.add_argument(
    '--out', help='.csv, or .jsonl for JSON; a table on screen if left out'
  )
  parser.add_argument(
    '--top', type=int, default=1, metavar='N', help='the N best classes'
  )
  parser.add_argument(
    '--probabilities', action='store_true', help='those of all classes'
  )
  parser.add_argument('paths', nargs='+', help='image files or folders')
  args = parser.parse_args()

  paths, others = look_at(args.paths)
  if args.out:
    files.check_target('--out', args.out)
    if pathlib.Path(args.out).suffix.lower() not in ('.csv', '.jsonl'):
      raise UserError(
        f'--out {args.out} must end with .csv or .jsonl, which chooses the '
        'format.'
      )
  classifier = classifier_lib.load(args.workdir or args.model, args.checkpoint)
  about = classifier.about
  if 'steps' in about and args.checkpoint == 'latest':  # Of a run.
    load.warn_unfinished(about['step'], about['steps'], 'Predict')
  table = Table(classifier.class_names, args.top, args.probabilities)
  if others:
    named = [f'{path} ({why})' for path, why in others.items()]
    count = messages.count(len(named), 'other file')
    messages.say(f'Skipped {count}: {messages.some(named)}.')
  # Rows on the same screen would tear the bar.
  shows = sys.stderr.isatty() and (args.out or not sys.stdout.isatty())
  bar = tqdm(
    total=len(paths), unit='image', dynamic_ncols=True, disable=not shows
  )
  skipped = 0

  def complain(path, reason):
    nonlocal skipped
    skipped += 1
    line = f'skipped: {path} cannot be read as an image: {reason}'
    tqdm.write(messages.printable(line), file=sys.stderr)
    bar.update()

  with bar, _output(args.out, table) as write:

    def advance(path, probs):
      write(path, probs)
      bar.update()

    predict(classifier, paths, advance, complain)
    if skipped == len(paths):
      raise UserError('None of the files could be read as an image.')
  if args.out:
    print(f'{len(paths) - skipped} predictions are in {args.out}')


@contextlib.contextmanager
def _output(out: str | None, table: Table):
  """A function that writes a line of the file, or of standard output."""
  if not out:
    writer = csv.writer(sys.stdout)
    printed = lambda row: writer.writerow(map(messages.printable, row))
    printed(table.header())
    yield lambda path, probs: printed(table.row(path, probs))
    return
  # A file's name may be any bytes.
  options = {'encoding': 'utf-8', 'errors': 'surrogateescape', 'newline': ''}
  try:
    with files.replacing(out, mode='w', **options) as file:
      if pathlib.Path(out).suffix.lower() == '.jsonl':
        yield lambda path, probs: print(
          json.dumps(table.item(path, probs)), file=file
        )
      else:
        writer = csv.writer(file)
        writer.writerow(table.header())
        yield lambda path, probs: writer.writerow(table.row(path, probs))
  except OSError as error:
    raise UserError(f'Cannot write --out {out}: {error}.') from error


def _is_formula(text: str) -> bool:
  number = re.fullmatch(r'[+-][0-9.]+', text)
  return text[:1] in ('=', '+', '-', '@', '\t', '\r') and not number


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
