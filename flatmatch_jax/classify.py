"""A trained model as a function from images to probabilities."""

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.data import augment


def make_classifier(model, mean, std, batch_size: int):
  """Returns `classify(params, batch_stats, images) -> probabilities [N, K]`.

  Images are uint8 and enter as they are, in batches of one size: the last one
  is filled up, and its filling cut off again, so each image counts once.
  """

  @jax.jit
  def probabilities(params, batch_stats, images):
    variables = {'params': params, 'batch_stats': batch_stats}
    images = augment.normalize(images, mean, std)
    return jax.nn.softmax(model.apply(variables, images, train=False).logits)

  def classify(params, batch_stats, images):
    rows = []
    for start in range(0, len(images), batch_size):
      batch = images[start : start + batch_size]
      missing = batch_size - len(batch)
      batch = jnp.pad(batch, ((0, missing), (0, 0), (0, 0), (0, 0)))
      rows.append(probabilities(params, batch_stats, batch))
    return np.concatenate([np.asarray(row) for row in rows])[: len(images)]

  return classify


def error_percent(probabilities, labels) -> float:
  """Share of wrong classes, in percent."""
  wrong = int(np.sum(probabilities.argmax(-1) != np.asarray(labels)))
  return 100.0 * wrong / len(labels)


def errors(classify, state, images, labels) -> dict[str, float]:
  """Errors in percent of the averaged weights and of the raw ones.

  Both use the live running statistics, as published code bases do.
  """
  weights = {'error': state.ema_params, 'error_raw': state.params}
  return {
    name: error_percent(classify(params, state.batch_stats, images), labels)
    for name, params in weights.items()
  }
