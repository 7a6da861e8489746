"""What the networks share: BatchNorm as the train step expects it, heads."""

import functools

import flax.linen as nn

from flatmatch_jax.types import Head, Prediction


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


def predict(
  features, num_classes: int, heads: tuple[Head, ...], train: bool, dense
) -> Prediction:
  """The outputs for `features` [B, D]; `dense` is the network's linear layer.

  To be called within a module's `__call__`.
  """
  logits = dense(num_classes, name='classifier')(features)
  outputs = {}
  for head in heads:
    x = features
    if head.hidden:
      x = nn.relu(dense(x.shape[-1], name=f'{head.name}_hidden')(x))
    outputs[head.name] = dense(head.size or num_classes, name=head.name)(x)
    if head.evaluated and not train:
      logits = outputs[head.name]
  return Prediction(logits, features, outputs)
