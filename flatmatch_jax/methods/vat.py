"""Virtual adversarial training (https://arxiv.org/abs/1704.03976).

The small change of an image that changes its prediction most should not.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def vat(
  steps: int,
  radius: NonNegative = 6.0,
  weight: NonNegative = 0.3,
  entropy_weight: NonNegative = 0.06,
  ramp: Share = 0.4,
) -> Method:
  """VAT with one power iteration, and minimal entropy, which is not ramped.

  `radius` is the L2 norm of an image's change, in units of normalized pixels.
  """

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    logits = lambda images: predict(images).logits
    noise = unit(jax.random.normal(rng, views['weak'].shape))
    direction = unit(curvature(logits, views['weak'], noise))
    views['strong'] = views['weak'] + radius * direction
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    smoothness = losses.kl(probs, student['strong'].logits)
    scale = weight * losses.ramp(step, steps, ramp)
    entropy = losses.entropy(student['weak'].logits)
    unlabeled = scale * smoothness + entropy_weight * entropy
    guess = probs.argmax(-1)
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(len(guess)))}
    return Losses(labeled, unlabeled), state, metrics

  return Method(loss, prepare, views=('weak',))


def curvature(logits, images, direction):
  """The Hessian of KL(p(images) ‖ p(images + d)) at d = 0 times `direction`.

  Exact, where differences of gradients are lost in float32. With J the
  Jacobian of the logits it is Jᵀ(diag(p) - ppᵀ)J: the logits' own curvature
  is multiplied by the gradient of the KL at its minimum, which is zero.
  """
  z, pushforward = jax.linearize(logits, images)
  pullback = jax.linear_transpose(pushforward, images)
  probs = jax.nn.softmax(z)  # [U, K]
  change = pushforward(direction)  # [U, K]
  mean = jnp.sum(probs * change, axis=-1, keepdims=True)
  return pullback(probs * (change - mean))[0]


def unit(directions):
  """Scales each [H, W, C] to L2 norm one; a zero direction stays zero."""
  axes = (1, 2, 3)
  # First to a maximum of one: the squares of small numbers vanish.
  largest = jnp.abs(directions).max(axes, keepdims=True)
  directions = directions / jnp.where(largest > 0, largest, 1.0)
  norm = jnp.sqrt(jnp.sum(directions**2, axes, keepdims=True))
  return directions / jnp.where(norm > 0, norm, 1.0)
