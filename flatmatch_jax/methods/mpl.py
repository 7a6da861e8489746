"""Meta Pseudo Labels (https://arxiv.org/abs/2003.10580).

A teacher labels the unlabeled images for a student, and learns from whether
the student, having learned from them, does better on the labeled images.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import (
  Decay,
  NonNegative,
  Number,
  Positive,
  PositiveCount,
  Share,
)
from flatmatch_jax.types import Losses, PseudoLabels, PyTree


class MPLState(NamedTuple):
  """The teacher. It always normalizes by its batch: no running statistics."""

  params: PyTree
  opt_state: PyTree
  mean_feedback: jax.Array  # Moving average of the student's improvement.


def mpl(
  forward,
  tx,
  init_network,
  threshold: Share = 0.6,
  temperature: Positive = 0.7,
  label_smoothing: Annotated[float, Number(0, 1, below=True)] = 0.1,
  uda_weight: NonNegative = 8.0,
  uda_warmup_steps: PositiveCount = 5000,
  feedback_decay: Decay = 0.99,
) -> Method:
  """MPL with hard labels in the feedback and UDA as the teacher's own loss.

  The teacher has the student's architecture and its own state of the optimizer
  `tx`. Predictions from confidence `threshold` on are targets for both;
  `label_smoothing` is what the teacher leaves to the wrong classes.
  """

  def init(rng, variables, info):
    del variables, info
    # Another key than the student's.
    params = init_network(jax.random.fold_in(rng, 1))['params']
    return MPLState(params, tx.init(params), jnp.zeros(()))

  def targets_from(logits):
    """Sharpened predictions [U, K], and which are confident enough [U]."""
    confident = jax.nn.softmax(logits).max(-1) >= threshold
    return jax.nn.softmax(logits / temperature), confident.astype(jnp.float32)

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)

    def teach(params):
      outputs, _ = forward(params, state.batch_stats, views)
      logits = {name: output.logits for name, output in outputs.items()}
      weak = logits.pop('weak')  # Only a target: no gradient goes through it.
      return logits, weak

    # `feedback` pulls the teacher's gradient back through this same pass.
    logits, pull_back, weak = jax.vjp(teach, state.method.params, has_aux=True)
    targets['probs'], targets['mask'] = targets_from(logits['strong'])
    views = {name: views[name] for name in ('labeled', 'strong')}
    return Prepared(views, targets, kept=(logits, weak, pull_back))

  def loss(student, teacher, targets, state, step):
    del teacher, step  # The student's own predictions teach nothing here.
    probs, mask = targets['probs'], targets['mask']
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['strong'].logits, probs, mask)
    metrics = {'pseudo_labels': PseudoLabels(probs.argmax(-1), mask)}
    return Losses(labeled, unlabeled), state, metrics

  def teacher_loss(logits, weak, label, improvement, step):
    labeled = losses.cross_entropy(
      logits['labeled'], smooth(label, weak.shape[-1], label_smoothing)
    )
    strong = logits['strong']
    uda = losses.cross_entropy(strong, *targets_from(weak))
    ramp = jnp.minimum(1.0, (step + 1) / uda_warmup_steps)
    # Reinforces the labels it gave, or discourages them. Soft labels would
    # have no gradient: the network already predicts what it predicts.
    meta = improvement * losses.cross_entropy(strong, strong.argmax(-1))
    return labeled + uda_weight * ramp * uda + meta

  def feedback(before, after, batch, targets, kept):
    def student_loss(params):
      views = {'labeled': batch.labeled['weak']}
      outputs, _ = forward(params, before.batch_stats, views)
      return losses.cross_entropy(outputs['labeled'].logits, targets['label'])

    params, opt_state, mean = after.method
    improvement = student_loss(before.params) - student_loss(after.params)
    mean = feedback_decay * mean + (1 - feedback_decay) * improvement
    logits, weak, pull_back = kept
    cotangent = jax.grad(teacher_loss)(
      logits, weak, targets['label'], improvement - mean, before.step
    )
    (gradient,) = pull_back(cotangent)
    updates, opt_state = tx.update(gradient, opt_state, params)
    return MPLState(optax.apply_updates(params, updates), opt_state, mean)

  return Method(
    loss,
    prepare=prepare,
    init=init,
    feedback=feedback,
    trains_on=Losses(0.0, 1.0),
  )


def smooth(label, num_classes, smoothing):
  """One-hot labels [B, K] that give `smoothing` to the *other* classes."""
  one_hot = jax.nn.one_hot(label, num_classes)
  others = smoothing / (num_classes - 1)
  return one_hot * (1 - smoothing) + (1 - one_hot) * others
