"""Encoded images as pixels, and boxes of them at the network's size.

Boxes are [y, x, h, w] in pixels; those that are random are functions of uniform
numbers [TRIES, DRAWS] and of the size of the image. JPEGs are decoded by
libjpeg-turbo and scaled by OpenCV, which release Python's lock.
"""

import io
import math

import numpy as np
from PIL import Image

from flatmatch_jax.data import images

# Weak and test images: a square of 7/8 of the shorter side (224 of 256).
SHARE = 7 / 8
# Strong images: a share of the area and a ratio of width to height.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
TRIES = 10
DRAWS = 4  # Of each try: area, ratio, row, column.

Box = tuple[int, int, int, int]


def random_box(view: str, uniform, height: int, width: int) -> Box:
  """The box of a view, which is named after its augmentation."""
  make = strong_box if view.startswith('strong') else weak_box
  return make(uniform, height, width)


def weak_box(uniform, height: int, width: int) -> Box:
  """A random square of `SHARE` of the shorter side."""
  side = _square(height, width)
  return _at_random(uniform[0], height, width, side, side)


def centre_box(height: int, width: int) -> Box:
  side = _square(height, width)
  return _at_centre(height, width, side, side)


def _square(height, width):
  return max(1, round(min(height, width) * SHARE))


def strong_box(uniform, height: int, width: int) -> Box:
  """A random area and ratio; after ten misfits the centre, as torchvision."""
  low, high = map(math.log, _RATIO)
  for numbers in uniform.tolist():
    area = height * width * (_AREA[0] + numbers[0] * (_AREA[1] - _AREA[0]))
    ratio = math.exp(low + numbers[1] * (high - low))
    h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
    if 0 < h <= height and 0 < w <= width:
      return _at_random(numbers, height, width, h, w)
  h = round(min(height, width / _RATIO[0]))
  w = round(min(width, height * _RATIO[1]))
  return _at_centre(height, width, h, w)


def _at_random(numbers, height, width, h, w):
  """Places a box of h x w by the third and fourth of the numbers."""
  place = lambda number, room: min(int(number * (room + 1)), room)
  return place(numbers[2], height - h), place(numbers[3], width - w), h, w


def _at_centre(height, width, h, w):
  return (height - h) // 2, (width - w) // 2, h, w


def decode(data: bytes) -> np.ndarray:
  """An encoded image as uint8 [H, W, 3], not turned as its EXIF may say.

  What is no flawless JPEG in grey or colour, Pillow reads: CMYK, other formats
  whatever the name says, and files with stray bytes. What it cannot read
  raises an error of any type.
  """
  import simplejpeg

  if simplejpeg.is_jpeg(data):
    try:
      return simplejpeg.decode_jpeg(data)
    except ValueError:
      pass
  with Image.open(io.BytesIO(data), formats=images.FORMATS) as image:
    return np.asarray(images.convert(image, 'RGB'))


def cut(image: np.ndarray, box: Box, size: int) -> np.ndarray:
  """A box scaled to [size, size, 3]: means of areas along sides that shrink."""
  import cv2

  y, x, h, w = box
  part = image[y : y + h, x : x + w]
  smaller = min(w, size), min(h, size)
  if smaller != (w, h):
    part = cv2.resize(part, smaller, interpolation=cv2.INTER_AREA)
  if smaller != (size, size):
    part = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR_EXACT)
  return part
