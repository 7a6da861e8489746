"""FlexMatch (https://arxiv.org/abs/2110.08263).

A class that is rarely predicted with confidence is being learned slowly, so
its confidence threshold is lowered: curriculum pseudo-labeling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Entries, Losses, Pending, PseudoLabels


class FlexMatchState(NamedTuple):
  """Each image's last confident class, and how many images have which."""

  # [N]: -1 where there has been none. An image outside the unlabeled pool keeps
  # -1 and is not counted.
  table: jax.Array
  # [K + 1]: of each class and, last, of -1. Kept beside the table, not counted
  # anew: a batch changes hundreds of the table's entries, out of a million.
  counts: jax.Array


def flexmatch(threshold: Share = 0.95, weight: NonNegative = 1.0) -> Method:
  """FlexMatch with threshold warm-up and the convex mapping."""

  def init(rng, variables, info):
    del rng, variables
    return FlexMatchState(
      table=jnp.full(info.num_train, -1, jnp.int32),
      counts=jnp.zeros(info.num_classes + 1, jnp.int32)
      .at[-1]
      .set(info.num_unlabeled),
    )

  def loss(student, teacher, targets, state, step):
    del step
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    confidence, guess = probs.max(-1), probs.argmax(-1)  # [U]
    # The images without a class are the largest group at first: warm-up.
    status = state.counts[:-1] / state.counts.max()  # β [K]
    thresholds = threshold * status / (2 - status)
    mask = (confidence >= thresholds[guess]).astype(jnp.float32)  # [U]
    pending = write(state, targets['index'], guess, confidence >= threshold)

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['strong'].logits, guess, mask)
    metrics = {
      'pseudo_labels': PseudoLabels(guess, mask),
      'threshold': thresholds.mean(),
    }
    return Losses(labeled, weight * unlabeled), pending, metrics

  return Method(loss, init=init)


def write(state: FlexMatchState, index, guess, confident) -> Pending:
  """Enters the confident guesses [U]; of several for one image the last."""
  row = jnp.arange(len(index))
  again = (index[:, None] == index) & (row[:, None] < row) & confident
  enters = confident & ~again.any(-1)  # [U]
  old = state.table[index]  # Its -1 is also the place of -1 in the counts.
  enters_once = enters.astype(jnp.int32)
  counts = state.counts.at[old].add(-enters_once).at[guess].add(enters_once)
  entries = Entries(
    rows=jnp.where(enters, index, len(state.table)),
    # What is dropped may be anything; that it comes from the table makes
    # XLA read before it writes, in place.
    values=jnp.where(enters, guess, old),
  )
  return Pending(state._replace(counts=counts), {'table': entries})
