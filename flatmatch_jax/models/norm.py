"""BatchNorm as the train step expects it of every network."""

import functools

import flax.linen as nn


def batch_norm(train: bool, epsilon: float, dtype):
  """A BatchNorm layer, to be called with a name.

  In training it returns the batch's own statistics, a momentum of 0: the train
  step averages them. `dtype` is that of its output; it computes in float32.
  """
  return functools.partial(
    nn.BatchNorm,
    use_running_average=not train,
    momentum=0.0,
    epsilon=epsilon,
    dtype=dtype,
  )
