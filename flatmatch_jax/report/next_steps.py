"""What to do next with the user's own images, and the commands for it."""

import itertools
import os
import pathlib
import shlex

import numpy as np

from flatmatch_jax.data import layouts
from flatmatch_jax.report import reproduce
from flatmatch_jax.report.advice import Advice, Shown
from flatmatch_jax.report.page import (
  Html,
  join,
  note,
  picture,
  scrolling,
  table,
  tag,
)
from flatmatch_jax.report.predictions import Predictions
from flatmatch_jax.report.runs import RunFiles
from flatmatch_jax.types import UserError

_PAIRS = 5
_SURE = 0.5  # From here on a guess gets a command that follows it.


def section(
  run: RunFiles, advice: Advice | None, found: Predictions | None
) -> Html:
  """The steps, the most useful first; '' where no advice can be given."""
  if advice is None:
    return Html('')
  names = run.dataset['class_names']
  parts = [
    labels_to_give(run, advice, names),
    labels_to_check(run, advice, names),
    confused(found, names) if found else measure(run),
    again(run),
  ]
  steps = [part for part in parts if part]
  return tag('ol', *[tag('li', step) for step in steps], class_='steps')


def labels_to_give(run, advice: Advice, names) -> Html:
  images = advice.to_label
  if not images:
    return Html('')
  words = [
    join(tag('b', f'{names[shown.guess]}?'), tag('span', sure(shown)))
    for shown in images
  ]
  text = (
    'The network is unsure of these images, and they differ from each other '
    'and from what is labeled; below each is its guess.'
  )
  return join(
    tag('h3', f'Label these {len(images)} images first'),
    note(text),
    gallery(images, words),
    _label(run, advice) if run.config['dataset'] == 'folder' else '',
  )


def labels_to_check(run, advice: Advice, names) -> Html:
  title = tag('h3', 'Check these labels')
  how = (
    'A network memorizes wrong labels. If it agrees with a label, the guess '
    'is its mean guess for the unlabeled images that look most similar.'
    if advice.asked
    else 'Networks memorize wrong labels, so some may be missing here.'
  )
  if not advice.suspects:
    return join(
      title, note(f'None of {advice.num_labeled:,} labels looks wrong. {how}')
    )
  words = [
    join(
      tag('b', names[shown.label]),
      tag('small', f'or {names[shown.guess]}? {sure(shown)}'),
    )
    for shown in advice.suspects
  ]
  taken: set[str] = set()
  commands = [
    _move(run, shown, names, taken)
    for shown in advice.suspects
    if shown.confidence >= _SURE
  ]
  these = 'these look' if len(advice.suspects) > 1 else 'this looks'
  return join(
    title,
    note(
      f'Of {advice.num_labeled:,} labels, {these} the most doubtful; many '
      f'may still be right. {how}'
    ),
    gallery(advice.suspects, words),
    note('Run only the lines for labels that are wrong:')
    if any(commands)
    else '',
    _command(*filter(None, commands)) if any(commands) else '',
  )


def confused(found: Predictions, names) -> Html:
  """The pairs of classes with most mistakes between them."""
  confusion = np.array(found.report['confusion'])
  wrong = np.triu(confusion + confusion.T, 1)
  order = np.argsort(-wrong, axis=None, kind='stable')[:_PAIRS]
  rows = [
    [f'{names[i]} and {names[j]}', int(confusion[i, j]), int(confusion[j, i])]
    for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True)
    if wrong[i, j]
  ]
  if not rows:
    return Html('')
  head = ['classes', 'first taken for second', 'second for first']
  return join(
    tag('h3', 'Tell these classes apart'),
    note(
      f'Mistakes among {len(found.labels):,} {found.kind} images. Label more '
      'of both classes, above all images that are hard to tell; if you cannot '
      'tell them yourself, make them one class.'
    ),
    tag('div', table(head, rows, 'confused classes'), class_='card'),
  )


def measure(run) -> Html:
  """No image with a label was held out, so no error is known."""
  return join(
    tag('h3', 'Measure the error'),
    note(
      'No images are held out, so nobody knows how good the network is. Put '
      'some with labels into test/CLASS/, or hold some of the labeled ones out:'
    ),
    _command(_train(run, num_val=max(10, run.labels // 5))),
  )


def again(run) -> Html:
  steps = 2 * run.config['steps']
  return join(
    tag('h3', 'Train again'),
    note('With the new labels, in another folder; then for twice as long:'),
    _command(_train(run), _train(run, steps=steps)),
  )


def gallery(images: list[Shown], words: list[Html]) -> Html:
  tiles = []
  for shown, word in zip(images, words, strict=True):
    name = pathlib.PurePath(shown.path).name
    tiles.append(
      tag(
        'figure',
        picture(shown.pixels, shown.path),
        tag('figcaption', word, tag('i', name), title=shown.path),
        class_='tile',
      )
    )
  return tag('div', *tiles, class_='gallery')


def sure(shown: Shown) -> str:
  return f'{shown.confidence:.0%}'


def _command(*lines: str) -> Html:
  return scrolling('commands', tag('pre', '\n'.join(lines)))


def _label(run, advice: Advice) -> Html:
  """How, in the layout of the data: the command would begin another."""
  root = pathlib.Path(run.config['data_dir']).expanduser()
  if (table := _table(root)).is_file():
    return note(f'Write their paths and labels into {table}.')
  if not advice.labeled_path.startswith('labeled/'):
    train = 'train/' if advice.labeled_path.startswith('train/') else ''
    return note(f'Move each to its class, {root}/{train}CLASS/.')
  words = ['python', '-m', 'flatmatch_jax.label', str(root)]
  return _command(shlex.join([*words, '--workdir', str(run.files.path)]))


def _table(root: pathlib.Path) -> pathlib.Path:
  """Where the labels are, if it is there."""
  return root if root.suffix.lower() == '.csv' else root / layouts.TABLE


def _move(run, shown: Shown, names, taken: set[str]) -> str:
  """From the folder of its class to that of the guess; '' if that is not it.

  The file gets a free name there, which joins those that are `taken`.
  """
  root = pathlib.Path(run.config['data_dir']).expanduser()
  if not shown.path.startswith('labeled/') or _table(root).is_file():
    return ''
  plain = root / 'labeled' / names[shown.guess] / pathlib.Path(shown.path).name
  numbered = (
    plain.with_name(f'{plain.stem}-{number}{plain.suffix}')
    for number in itertools.count(2)
  )
  targets = map(str, itertools.chain([plain], numbered))
  free = next(t for t in targets if t not in taken and not os.path.exists(t))
  taken.add(free)
  return shlex.join(['mv', '-n', str(root / shown.path), free])


def _train(run, **changes) -> str:
  """The run's command with fields changed; what follows them does so again."""
  folder = run.files.path
  name = '-'.join([folder.name, 'next', *changes])
  try:
    again = reproduce.command(run.config, str(folder.with_name(name)))
  except UserError as error:
    return f'# {error}'
  fields = [f'--config.{key}=' for key in changes]
  words = [w for w in shlex.split(again) if not w.startswith(tuple(fields))]
  values = [f'{f}{v}' for f, v in zip(fields, changes.values(), strict=True)]
  return shlex.join([*words[:-2], *values, *words[-2:]])
