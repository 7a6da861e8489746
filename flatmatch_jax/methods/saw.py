"""SAW (https://proceedings.mlr.press/v162/lai22b.html), for long tails.

FixMatch whose losses weigh a class by how few images have it: labeled images,
or unlabeled ones by their last guesses.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.methods.flexmatch import flexmatch, write
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import DatasetInfo, Losses, PseudoLabels


def saw(
  info: DatasetInfo, threshold: Share = 0.95, weight: NonNegative = 1.0
) -> Method:
  """SAW by effective numbers, on FixMatch.

  FlexMatch's table has the guesses, here also those that are not confident.
  Images without a guess are as many of each class. The authors' code follows
  the table once an epoch, this one at each step.
  """

  def loss(student, teacher, targets, state, step):
    del step
    known = targets['label']
    scale = weights(info.class_counts)[known]  # [B]
    labeled = losses.cross_entropy(student['labeled'].logits, known, scale)

    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    without = state.counts[-1] / info.num_classes
    scale = weights(state.counts[:-1] + without)[guess]  # [U]
    unlabeled = losses.cross_entropy(
      student['strong'].logits, guess, mask * scale
    )
    pending = write(state, targets['index'], guess, guess >= 0)
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    return Losses(labeled, weight * unlabeled), pending, metrics

  return Method(loss, init=flexmatch().init)


def weights(counts) -> jax.Array:
  """One over the effective number of images of each class [K]; mean 1.

  That is (1 - βⁿ) / (1 - β) for n images, with β = (N - 1) / N, where N is the
  mean of n over classes: up to N it grows like n, and beyond hardly.
  """
  counts = jnp.maximum(jnp.asarray(counts, jnp.float32), 1)
  effective = -jnp.expm1(counts * jnp.log1p(-1 / counts.mean()))
  return (1 / effective) / (1 / effective).mean()
