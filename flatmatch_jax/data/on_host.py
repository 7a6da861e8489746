"""RandAugment and Cutout by Pillow, for strong views that the host makes.

The pixels are those of `randaugment` and `augment`, which do the same on
devices. There, images of 224 x 224 take a TPU longer than the rest of its step;
here they take a fraction of the time of decoding.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from flatmatch_jax.data import randaugment


class Draws(NamedTuple):
  """What a strong view of one image draws, as the functions of devices do."""

  operation: list[int]  # Of randaugment.OPERATIONS, in turn.
  magnitude: list[int]
  centre: tuple[int, int]  # Of Cutout: y, x.
  side: int


def numbers(operations: int) -> int:
  """How many random numbers `draw` takes."""
  return 2 * operations + 3


def draw(raw) -> Draws:
  """Draws, uniformly, by whole numbers below 2^64."""

  def whole(number, low, high):
    return low + (int(number) * (high - low + 1) >> 64)

  *pairs, y, x, side = raw
  last = len(randaugment.OPERATIONS) - 1
  operation = [whole(number, 0, last) for number in pairs[::2]]
  ranges = [randaugment.RANGES[randaugment.OPERATIONS[o]] for o in operation]
  magnitude = [
    whole(number, low, high)
    for number, (low, high, _) in zip(pairs[1::2], ranges, strict=True)
  ]
  centre = whole(y, 0, 1023), whole(x, 0, 1023)
  return Draws(operation, magnitude, centre, whole(side, 0, 512))


def strong(pixels: np.ndarray, draws: Draws) -> np.ndarray:
  """Operations of RandAugment and Cutout, on uint8 [H, W, C]."""
  image = from_array(pixels)
  for pair in zip(draws.operation, draws.magnitude, strict=True):
    image = apply(image, *pair)
  return np.asarray(cutout(image, draws.centre, draws.side)).reshape(
    pixels.shape
  )


def from_array(pixels: np.ndarray) -> Image.Image:
  return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def apply(image: Image.Image, operation: int, magnitude: int) -> Image.Image:
  """One operation, as TorchSSL calls it."""
  name = randaugment.OPERATIONS[operation]
  return _APPLY[name](image, magnitude / randaugment.RANGES[name][2])


def _affine(matrix: Callable) -> Callable:
  return lambda image, value: image.transform(
    image.size, Image.Transform.AFFINE, matrix(value, *image.size)
  )


def _enhance(kind: Callable) -> Callable:
  return lambda image, value: kind(image).enhance(value)


_APPLY: dict[str, Callable[[Image.Image, float], Image.Image]] = {
  'AutoContrast': lambda image, value: ImageOps.autocontrast(image),
  'Brightness': _enhance(ImageEnhance.Brightness),
  'Color': _enhance(ImageEnhance.Color),
  'Contrast': _enhance(ImageEnhance.Contrast),
  'Equalize': lambda image, value: ImageOps.equalize(image),
  'Identity': lambda image, value: image,
  'Posterize': lambda image, value: ImageOps.posterize(image, int(value)),
  'Rotate': lambda image, value: image.rotate(value),
  'Sharpness': _enhance(ImageEnhance.Sharpness),
  'ShearX': _affine(lambda value, width, height: (1, value, 0, 0, 1, 0)),
  'ShearY': _affine(lambda value, width, height: (1, 0, 0, value, 1, 0)),
  'Solarize': lambda image, value: ImageOps.solarize(image, int(value)),
  'TranslateX': _affine(
    lambda value, width, height: (1, 0, value * width, 0, 1, 0)
  ),
  'TranslateY': _affine(
    lambda value, width, height: (1, 0, 0, 0, 1, value * height)
  ),
}


def cutout(image: Image.Image, centre, side: int) -> Image.Image:
  """Paints a square over a copy, as TorchSSL does: see `augment.cutout`."""
  if side == 0:
    return image
  width, height = image.size
  extent = side / 1024 * width
  x = int(max(0, centre[1] / 1024 * width - extent / 2))
  y = int(max(0, centre[0] / 1024 * height - extent / 2))
  box = (x, y, min(width, x + extent), min(height, y + extent))
  fill = (125, 123, 114) if image.mode == 'RGB' else 123
  image = image.copy()
  ImageDraw.Draw(image).rectangle(box, fill)
  return image
