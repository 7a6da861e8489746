"""Images: what the network says of some, what training makes of others."""

from flatmatch_jax.report.page import (
  Html,
  join,
  note,
  picture,
  scrolling,
  tag,
)
from flatmatch_jax.report.predictions import Predictions


def examples(found: Predictions, names: list[str]) -> Html:
  groups = []
  for title, (images, numbers) in found.examples.items():
    tiles = []
    for image, row in zip(images, numbers, strict=True):
      probabilities = found.probabilities[row]
      guess, truth = int(probabilities.argmax()), int(found.labels[row])
      right = guess == truth
      sure = f'{probabilities[guess]:.1%}'
      alt = f'{names[truth]}, predicted {names[guess]} with {sure}'
      words = [tag('b', names[guess]), tag('span', sure)]
      if not right:
        words.append(tag('small', f'is {names[truth]}'))
      tiles.append(
        tag(
          'figure',
          picture(image, alt),
          tag('figcaption', *words, title=alt),
          class_='tile right' if right else 'tile wrong',
        )
      )
    groups.append(tag('h3', title) + tag('div', *tiles, class_='gallery'))
  return join(
    note(
      f'{found.kind.capitalize()} images; below each the prediction, its '
      'confidence and, where it is wrong, what the image is.'
    ),
    *map(Html, groups),
  )


def augmentations(found: Predictions) -> Html:
  rows = []
  for name, images in found.views.items():
    cells = [
      tag('td', picture(image, f'{name} of training image {i + 1}'))
      for i, image in enumerate(images)
    ]
    rows.append(tag('tr', tag('th', name, scope='row'), *cells))
  text = 'Training images, one a column, and what training makes of them.'
  if found.cropped:
    text += ' Random crops, which streamed images go through, are not shown.'
  body = tag('table', tag('tbody', *rows), class_='views')
  return join(note(text), scrolling('augmented images', body))
