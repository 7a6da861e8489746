"""Mean Teacher (https://arxiv.org/abs/1703.01780).

The student should agree with the moving average of its own weights.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def mean_teacher(
  steps: int, weight: NonNegative = 50.0, ramp: Share = 0.4
) -> Method:
  """Mean Teacher: the teacher has the averaged weights that are evaluated.

  It normalizes by the statistics of its batch, as the student does.
  """

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    # The student does not see the teacher's view: a pass less.
    teacher = predict(views.pop('weak'), params=state.ema_params)
    return Prepared(views, targets | {'probs': jax.nn.softmax(teacher.logits)})

  def loss(student, teacher, targets, state, step):
    del teacher  # The network at θ; ours is in the targets.
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.mse(student['weak2'].logits, targets['probs'])
    scale = weight * losses.ramp(step, steps, ramp)
    guess = targets['probs'].argmax(-1)  # [U]
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(len(guess)))}
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(loss, prepare, views=('weak', 'weak2'))
