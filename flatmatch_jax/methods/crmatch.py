"""CRMatch (https://arxiv.org/abs/2112.05825).

FixMatch whose features keep what augmentation did: confident pairs of views get
one label, but features that are far apart. A second task is to tell rotations.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Head, Losses, PseudoLabels, UserError

_TURNS = ('turned0', 'turned1', 'turned2', 'turned3')


def crmatch(
  threshold: Share = 0.95,
  weight: NonNegative = 1.0,
  distance_weight: NonNegative = 1.0,
  rotation_weight: NonNegative = 1.0,
) -> Method:
  """CRMatch with the equivariant feature distance loss.

  Distances are those of a linear map of the pooled features, where USB maps the
  features of all places. As many weak views as there are labeled images are
  shown in all four rotations.
  """

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    number = len(views['labeled'])
    images = views['weak'][:: max(len(views['weak']) // number, 1)][:number]
    height, width = images.shape[1:3]
    if height != width:
      raise UserError(
        f'CRMatch turns images, which must be square, but these are of {width} '
        f'x {height} pixels; use another method, or square images.'
      )
    for k, name in enumerate(_TURNS):
      views[name] = jnp.rot90(images, k, axes=(1, 2))
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    del step
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    alike = jnp.sum(
      losses.unit(student['strong'].heads['distance'])
      * losses.unit(teacher['weak'].heads['distance']),
      axis=-1,
    )
    turns = [
      losses.cross_entropy(
        student[name].heads['rotation'],
        jnp.full(len(student[name].logits), k),
      )
      for k, name in enumerate(_TURNS)
    ]

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = (
      weight * losses.cross_entropy(student['strong'].logits, guess, mask)
      + distance_weight * jnp.mean(mask * jnp.maximum(alike, 0.0))
      + rotation_weight * sum(turns) / len(turns)
    )
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    return Losses(labeled, unlabeled), state, metrics

  return Method(
    loss,
    prepare,
    heads=(Head('distance', 128), Head('rotation', 4, hidden=True)),
    populations=(_TURNS,),
  )
