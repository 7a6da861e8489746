"""The types every other module speaks in.

Dimension letters: B labeled batch, U unlabeled batch, H W C image, K classes,
D features, N examples of the training set.
"""

import difflib
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

PyTree = Any


class Batch(NamedTuple):
  """One step of augmented data: global arrays, sharded on their first axis.

  `data.batch.from_arrays` makes one from images of your own.
  """

  # 'weak' and other views [B, H, W, C], 'label' [B]; 'index' [B] is the place
  # among the labeled images.
  labeled: dict[str, jax.Array]
  # 'weak', 'strong', … [U, H, W, C], 'index' [U]; 'truth' [U] is for metrics
  # only, -1 where unknown, and may be left out.
  unlabeled: dict[str, jax.Array]
  # 'weak', 'label': images whose labels serve the perturbation only.
  fixed: dict[str, jax.Array] | None = None


class Head(NamedTuple):
  """An extra output of the network, computed from its features."""

  name: str
  size: int = 0  # 0 is the number of classes.
  hidden: bool = False  # After a layer as wide as the features, and a ReLU.
  evaluated: bool = False  # Classifies outside training, for the classifier.


class Prediction(NamedTuple):
  """What a model returns for a batch of images."""

  logits: jax.Array  # [B, K]
  features: jax.Array  # [B, D]
  heads: dict[str, jax.Array]  # By the name of the head; often empty.


Views = dict[str, jax.Array]  # Images by name: 'labeled', 'weak', 'strong'.
Outputs = dict[str, Prediction]  # Keyed by the names of the views.


class Losses(NamedTuple):
  """The two scalars a method returns. A recipe's row has the same type."""

  labeled: Any
  unlabeled: Any


class PseudoLabels(NamedTuple):
  """The classes a method guessed, and how much it trusts each."""

  label: jax.Array  # [U]
  weight: jax.Array  # [U] float, 0 to 1.


class Entries(NamedTuple):
  """What a step writes into a table [N, …]."""

  rows: jax.Array  # [U], N where nothing is written.
  values: jax.Array  # [U, …]


class Pending(NamedTuple):
  """A method's new state, but for tables that are yet to be written.

  Whether a step is kept is known only at its end, and a table over all
  examples is too large to be copied for that at every step.
  """

  state: Any  # A NamedTuple; its tables are those before the step.
  entries: dict[str, Entries]  # By the field of the table.

  def written(self, kept: jax.Array | bool = True) -> Any:
    """The state with its tables written, where the step is `kept`."""
    tables = {}
    for name, (rows, values) in self.entries.items():
      table = getattr(self.state, name)
      rows = jnp.where(kept, rows, len(table))
      tables[name] = table.at[rows].set(values, mode='drop')
    return self.state._replace(**tables) if tables else self.state


class DatasetInfo(NamedTuple):
  """What a method may know of the data beforehand."""

  num_classes: int
  num_train: int  # Indices of unlabeled images are below this.
  num_unlabeled: int  # Images in the unlabeled pool; at most `num_train`.
  class_counts: tuple[int, ...]  # Labeled images of each class.


class Skipped(NamedTuple):
  """How many steps were left out because their numbers were not finite."""

  total: jax.Array
  in_a_row: jax.Array  # Up to now; 0 after a step that was taken.


@flax.struct.dataclass
class TrainState:
  """Everything that changes in training. Arrays only: Orbax saves it all."""

  step: jax.Array
  params: PyTree
  batch_stats: PyTree
  opt_state: PyTree
  ema_params: PyTree
  perturb: PyTree  # The gradient buffer M of FlatMatch-e; () where unused.
  method: PyTree  # Thresholds, histograms, tables, a teacher; often ().
  rng: jax.Array  # The base key; constant, folded with `step`.
  skipped: Skipped


class UserError(ValueError):
  """Wrong input, not a wrong program: shown as one line, without a traceback.

  The message names the value, the rule and the remedy.
  """


def check_known(kind: str, name: str, known) -> None:
  """Raises UserError unless `name` is one of the `known` ones."""
  if name not in known:
    raise UserError(
      f'Unknown {kind} {name!r}. Known: {", ".join(known) or "none"}.'
      + did_you_mean(name, known)
    )


def shortened(value: Any) -> str:
  """A value in one line of at most 60 characters, for messages."""
  text = ' '.join(repr(value).split())
  return text if len(text) <= 60 else f'{text[:60]}...'


def did_you_mean(name: str, known) -> str:
  """A sentence with the nearest of the `known` names; empty if none is near."""
  near = difflib.get_close_matches(name, list(known), 1)
  return f' Did you mean {near[0]!r}?' if near else ''
