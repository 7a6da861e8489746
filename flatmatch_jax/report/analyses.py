"""Figures that `python -m flatmatch_jax.analyze` left beside runs."""

from collections.abc import Iterable
import pathlib

from flatmatch_jax.report.page import (
  Html,
  card,
  data_uri,
  grid,
  join,
  note,
  scrolling,
  tag,
)

_KINDS = {'.png': 'image/png', '.svg': 'image/svg+xml'}
_COMPARED = 'compared_'
CAPTIONS = {
  'landscape': (
    'The loss on a plane through the weights, along two random directions '
    'whose filters are as long as the weights’ own at share 1; images are '
    'rotated at random.'
  ),
  'sharpness': (
    'How much a loss rises by a step of length ρ up a gradient: its own, or '
    'for cross-sharpness that of the labeled loss.'
  ),
  'hessian': (
    'Curvature of the losses at the weights; bars say how far an eigenvalue '
    'may be off.'
  ),
  'gradients': (
    'Of the labeled loss and of both losses together, on batches as in '
    'training. Above 90° a step that follows the sum raises the labeled loss.'
  ),
  'pseudo_labels': (
    'Which guesses the method trusts at the end, and how many of these are '
    'right.'
  ),
  'convergence': 'Test accuracy and losses as logged along training.',
  'sensitivity': 'Test error over the number in which the settings differ.',
  'efficiency': 'Each point is a run; times depend on what else ran beside it.',
}


def of_run(folder: pathlib.Path) -> Html:
  """Those of this run alone."""
  paths = folder.glob('analysis/*')
  return _cards(p for p in paths if not p.name.startswith(_COMPARED))


def of_several(folders: Iterable[pathlib.Path]) -> Html:
  """Those of several runs, which are in the folder of one of them."""
  return _cards(
    path for folder in folders for path in folder.glob(f'analysis/{_COMPARED}*')
  )


def _cards(paths: Iterable[pathlib.Path]) -> Html:
  figures: dict = {}
  for path in sorted(paths):
    if path.suffix in _KINDS:
      figures.setdefault(path.with_suffix(''), []).append(path)
  cards = []
  for stem, formats in figures.items():
    contents = {path: path.read_bytes() for path in formats}
    path = min(formats, key=lambda path: len(contents[path]))
    kind = stem.name.removeprefix(_COMPARED)
    name = kind.replace('_', ' ').capitalize()
    image = tag(
      'img', src=data_uri(_KINDS[path.suffix], contents[path]), alt=name
    )
    shown = scrolling(name, image, kind='paper')
    cards.append(card(name, shown, note=CAPTIONS.get(kind, ''), wide=True))
  if not cards:
    return Html('')
  text = 'By python -m flatmatch_jax.analyze; the numbers are in analysis/.'
  return join(note(text), grid(*cards))
