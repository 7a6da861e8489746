"""Crops of encoded images, in TensorFlow on the host.

A view is a box of the image, scaled to the size of the network's input. Boxes
are [y, x, h, w] in pixels; those that are random are functions of uniform
numbers [TRIES, DRAWS] and of the size of the image.
"""

import numpy as np

# Weak and test images: a square of 7/8 of the shorter side (224 of 256).
SHARE = 7 / 8
# Strong images: a share of the area and a ratio of width to height.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
TRIES = 10
DRAWS = 4  # Of each try: area, ratio, row, column.


def random_box(view: str, uniform, height, width):
  """The box of a view, which is named after its augmentation."""
  make = strong_box if view.startswith('strong') else weak_box
  return make(uniform, height, width)


def weak_box(uniform, height, width):
  """A random square of `SHARE` of the shorter side: [y, x, h, w]."""
  side = _square(height, width)
  return _at_random(uniform[0], height, width, side, side)


def centre_box(height, width):
  side = _square(height, width)
  return [(height - side) // 2, (width - side) // 2, side, side]


def _square(height, width):
  import tensorflow as tf

  shorter = tf.cast(tf.minimum(height, width), tf.float64)
  return tf.maximum(1, tf.cast(tf.round(shorter * SHARE), tf.int32))


def strong_box(uniform, height, width):
  """A random area and ratio; after ten misfits the centre, as torchvision."""
  import tensorflow as tf

  area = tf.cast(height * width, tf.float64)
  area *= _AREA[0] + uniform[:, 0] * (_AREA[1] - _AREA[0])
  low, high = np.log(_RATIO)
  ratio = tf.exp(low + uniform[:, 1] * (high - low))
  integer = lambda x: tf.cast(tf.round(x), tf.int32)
  heights = integer(tf.sqrt(area / ratio))
  widths = integer(tf.sqrt(area * ratio))
  fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
  first = tf.argmax(tf.cast(fits, tf.int32))

  def centre():
    low, high = (tf.constant(x, tf.float64) for x in _RATIO)
    h, w = tf.cast(height, tf.float64), tf.cast(width, tf.float64)
    h, w = integer(tf.minimum(h, w / low)), integer(tf.minimum(w, h * high))
    return tf.stack([(height - h) // 2, (width - w) // 2, h, w])

  def drawn():
    return tf.stack(
      _at_random(uniform[first], height, width, heights[first], widths[first])
    )

  return tf.unstack(tf.cond(tf.reduce_any(fits), drawn, centre))


def _at_random(uniform, height, width, h, w):
  """Places a box of h x w by the third and fourth of the numbers [draws]."""
  import tensorflow as tf

  def place(u, room):
    at = tf.cast(tf.floor(u * tf.cast(room + 1, tf.float64)), tf.int32)
    return tf.minimum(at, room)

  return [place(uniform[2], height - h), place(uniform[3], width - w), h, w]


def decode(data, make_boxes, size: int):
  """Cuts boxes out of an encoded image: uint8 [size, size, 3] each.

  Of a JPEG only the rectangle around all boxes is decoded. TensorFlow turns
  grey and CMYK into RGB, and reads PNG, GIF and BMP too.
  """
  import tensorflow as tf

  def jpeg():
    shape = tf.io.extract_jpeg_shape(data)
    boxes = tf.convert_to_tensor(make_boxes(shape[0], shape[1]))  # [V, 4]
    start = tf.reduce_min(boxes[:, :2], 0)
    stop = tf.reduce_max(boxes[:, :2] + boxes[:, 2:], 0)
    window = tf.concat([start, stop - start], 0)
    image = tf.io.decode_and_crop_jpeg(data, window, channels=3)
    return image, boxes - tf.concat([start, tf.zeros_like(start)], 0)

  def other():
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    shape = tf.shape(image)
    return image, tf.convert_to_tensor(make_boxes(shape[0], shape[1]))

  def cut(image, box):
    part = tf.slice(image, [box[0], box[1], 0], [box[2], box[3], 3])
    scaled = tf.image.resize(part, (size, size), antialias=True)
    return tf.saturate_cast(tf.round(scaled), tf.uint8)

  image, boxes = tf.cond(tf.io.is_jpeg(data), jpeg, other)
  return [cut(image, box) for box in tf.unstack(boxes)]
