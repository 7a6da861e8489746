"""AdaMatch (https://arxiv.org/abs/2106.04732).

FixMatch whose pseudo-labels follow the labeled images: their mean prediction
aligns the classes, and their mean confidence scales the threshold.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import DatasetInfo, Losses, PseudoLabels


def adamatch(
  steps: int,
  info: DatasetInfo,
  threshold: Share = 0.9,
  weight: NonNegative = 1.0,
) -> Method:
  """AdaMatch for unlabeled images of the labeled images' own domain.

  The labeled images go through the network twice: alone, and together with all
  unlabeled views. Each of their logits is drawn from between the two results,
  so that the network agrees with itself whatever BatchNorm normalizes by.

  The labeled loss is on weak views only; the paper adds an equal loss on strong
  ones. Means are those of a batch and targets are soft, as in the paper's
  equations; the authors' code has moving averages and hard labels.

  Args:
    steps: length of training.
    info: for the number of classes.
    threshold: on confidence, relative to the mean over the labeled images.
    weight: of the unlabeled loss, which reaches it halfway through training.
  """

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    views['labeled_joint'] = views['labeled']
    shape = len(targets['label']), info.num_classes
    targets['share'] = jax.random.uniform(rng, shape)  # λ [B, K]
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    share = targets['share']
    known = jax.nn.softmax(interpolate(teacher, share))  # [B, K]
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    # `align` divides by what is predicted; what should be comes as a factor.
    wanted = known.mean(0) + 1e-6
    target = losses.align(probs * wanted, probs.mean(0))
    bar = threshold * known.max(-1).mean()
    mask = (target.max(-1) >= bar).astype(jnp.float32)  # [U]

    labeled = losses.cross_entropy(
      interpolate(student, share), targets['label']
    )
    unlabeled = losses.cross_entropy(student['strong'].logits, target, mask)
    scale = weight * warm_up(step, steps)
    metrics = {
      'pseudo_labels': PseudoLabels(target.argmax(-1), mask),
      'threshold': bar,
    }
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(
    loss,
    prepare,
    populations=(('labeled',), ('labeled_joint', 'weak', 'strong')),
  )


def interpolate(outputs, share):
  """The labeled images' logits [B, K], `share` of them of the joint pass."""
  joint, alone = outputs['labeled_joint'].logits, outputs['labeled'].logits
  return share * joint + (1 - share) * alone


def warm_up(step, steps: int):
  """μ(t): rises from 0 to 1 along a cosine in the first half of training."""
  return 0.5 - jnp.cos(jnp.minimum(jnp.pi, 2 * jnp.pi * step / steps)) / 2
