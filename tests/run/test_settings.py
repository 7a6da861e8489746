"""How configs differ, as a refusal says it."""

import ml_collections
import pytest

from configs import cifar10, digits
from flatmatch_jax.run import settings


def config(argument='', **changes):
  found = digits.get_config(argument)
  found.update(changes)
  return found


@pytest.mark.parametrize(
  ('there', 'here', 'named'),
  [
    (config(), config(), []),
    # Averages follow.
    (config(), config(steps=300), ['steps (400 there, 300 now)']),
    (
      config(),
      config(steps=300, ema_decay=0.5),
      ['ema_decay (0.95 there', 'steps (400 there, 300 now)'],
    ),
    # What was set does not.
    (config(steps=300, ema_decay=0.5), config(steps=300), ['ema_decay (0.5 t']),
    (
      config('method=fixmatch'),
      config('method=flexmatch+flatmatch'),
      ['method (fixmatch there, flexmatch+flatmatch now)'],
    ),
    (config('labels=40'), config('labels=80'), ['labels (40 there, 80 now)']),
    (
      config(learning_rate=0.1),
      config('method=fixmatch', learning_rate=0.2),
      ['learning_rate (0.1 there, 0.2 now)', 'method (flatmatch there, fix'],
    ),
    (config(data_dir='a'), config(data_dir='b'), []),
    # Equal by chance: what was set is what follows now.
    (
      config(steps=300, ema_decay=config().ema_decay),
      config(),
      ['steps (300 there, 400 now)'],
    ),
  ],
)
def test_what_follows_is_left_out(there, here, named):
  before = settings.as_dict(here)
  found = settings.changes(settings.as_dict(there), here)
  assert len(found) == len(named), found
  for text, start in zip(found, named, strict=True):
    assert text.startswith(start)
  assert settings.as_dict(here) == before


@pytest.mark.parametrize('steps', ['many', True])
def test_a_file_that_somebody_edited(steps):
  there = settings.as_dict(cifar10.get_config()) | {'steps': steps}
  (found,) = settings.changes(there, cifar10.get_config())
  assert found == f'steps ({steps} there, 1048576 now)'


def test_configs_stay_as_they_are():
  epochs = ml_collections.FieldReference(4)
  here = config()
  here.steps = epochs * 100
  there = settings.as_dict(config(steps=300))
  assert settings.changes(there, here) == ['steps (300 there, 400 now)']
  epochs.set(6)
  assert here.steps == 600
  frozen = ml_collections.FrozenConfigDict(config())
  assert settings.changes(settings.as_dict(config()), frozen) == []
