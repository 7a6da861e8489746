"""Pictures of the augmentations, as rows of images and as one sheet."""

import functools

import jax
import numpy as np
from PIL import Image, ImageDraw

from flatmatch_jax.data import augment, randaugment

COLUMNS = 10
LABEL_WIDTH = 96
GAP = 2


def operations(image: np.ndarray) -> dict[str, np.ndarray]:
  """Each operation on one image at COLUMNS magnitudes over its range."""
  batch = np.repeat(image[None], COLUMNS, 0)
  rows = {}
  apply = jax.jit(randaugment.apply)
  for number, name in enumerate(randaugment.OPERATIONS):
    low, high, _ = randaugment.RANGES[name]
    magnitude = np.linspace(low, high, COLUMNS).round().astype(np.int32)
    operation = np.full(COLUMNS, number, np.int32)
    rows[name] = np.asarray(apply(batch, operation, magnitude))
  return rows


def pairs(
  images: np.ndarray, pad: int, flip: bool, operations: int = 3
) -> dict[str, np.ndarray]:
  """The images, two weak and three strong draws of each."""
  rows = {'image': images}
  strong = functools.partial(augment.strong, operations=operations)
  for name, make, number in (('weak', augment.weak, 2), ('strong', strong, 3)):
    draw = jax.jit(make, static_argnums=(2, 3))
    for i in range(1, number + 1):
      rows[f'{name} {i}'] = np.asarray(
        draw(jax.random.key(i), images, pad, flip)
      )
  return rows


def sheet(rows: dict[str, np.ndarray], size: int = 48) -> Image.Image:
  """Lays rows of uint8 images under each other, their names beside them."""
  step = size + GAP
  width = LABEL_WIDTH + COLUMNS * step
  page = Image.new('RGB', (width, len(rows) * step), 'white')
  draw = ImageDraw.Draw(page)
  for y, (name, images) in enumerate(rows.items()):
    draw.text((4, y * step + size // 2 - 6), name, fill='black')
    for x, image in enumerate(images[:COLUMNS]):
      tile = Image.fromarray(image.squeeze())
      tile = tile.resize((size, size), Image.Resampling.NEAREST)
      page.paste(tile, (LABEL_WIDTH + x * step, y * step))
  return page
