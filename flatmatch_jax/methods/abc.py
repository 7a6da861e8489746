"""ABC (https://arxiv.org/abs/2110.10368), for long tails.

Beside FixMatch's classifier a second one learns from the same features, but
from equally many images of each class. It is the one that classifies.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.methods.fixmatch import fixmatch
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import DatasetInfo, Head, Losses


def abc(
  steps: int,
  info: DatasetInfo,
  threshold: Share = 0.95,
  weight: NonNegative = 1.0,
  balanced_weight: NonNegative = 1.0,
) -> Method:
  """ABC on FixMatch, with soft labels for the balanced classifier.

  An image counts by chance: of the class with the fewest labeled images each
  does, of another class as many. For unlabeled images the chance falls to this
  from 1 in the course of training.

  Args:
    steps: length of training.
    info: for the number of labeled images per class.
    threshold: on the confidence of either classifier.
    weight: of FixMatch's unlabeled loss.
    balanced_weight: of the balanced classifier's losses.
  """
  plain = fixmatch(threshold, weight)

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    for key, name in zip(
      jax.random.split(rng), ('label', 'index'), strict=True
    ):
      targets[f'{name}_draw'] = jax.random.uniform(key, targets[name].shape)
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    chance = balance(info.class_counts)  # [K]
    known = targets['label']
    kept = targets['label_draw'] < chance[known]  # [B]

    probs = jax.nn.softmax(teacher['weak'].heads['balanced'])  # [U, K]
    falling = 1 - step / steps * (1 - chance)
    mask = (probs.max(-1) >= threshold) & (
      targets['index_draw'] < falling[probs.argmax(-1)]
    )

    balanced = Losses(
      losses.cross_entropy(student['labeled'].heads['balanced'], known, kept),
      losses.cross_entropy(student['strong'].heads['balanced'], probs, mask),
    )
    value, state, metrics = plain.loss(student, teacher, targets, state, step)
    value = Losses(
      *(a + balanced_weight * b for a, b in zip(value, balanced, strict=True))
    )
    return value, state, metrics

  return Method(loss, prepare, heads=(Head('balanced', evaluated=True),))


def balance(class_counts) -> jax.Array:
  """The chance [K] of a class's images by which all classes count alike."""
  counts = np.maximum(class_counts, 1)
  return jnp.asarray(counts.min() / counts, jnp.float32)
