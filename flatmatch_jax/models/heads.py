"""What all networks end with: a classifier, and the heads of a method."""

import flax.linen as nn

from flatmatch_jax.types import Head, Prediction


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
