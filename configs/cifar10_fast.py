"""CIFAR-10 in about an hour of one CPU core: docs/results.md.

  python main.py --config configs/cifar10_fast.py:labels=250 --workdir runs/fast
  python main.py --config configs/cifar10_fast.py:method=fixmatch,labels=4000
  python main.py --config configs/cifar10_fast.py:labels=250 \
      --config.steps=36000 --config.learning_rate=0.01 --workdir runs/longer

A network with 1.2 million parameters; 8,000 steps, or 16,000 with more than
1,000 labels. From 250 labels FlatMatch ends at 31.7 ± 1.3% test error after 25
to 55 minutes of a core, by its speed, and the third command at 22.5% after two
hours. Labels alone give 51.8 ± 1.7%. From 4,000 labels it ends at 17.1% after
an hour (labels alone: 20.8%; one seed each).
"""

from configs import cifar10
from flatmatch_jax.training import common


def get_config(arg=''):
  variant = common.parse(arg, labels=250)
  config = cifar10.get_config(
    ','.join(f'{key}={value}' for key, value in variant.items())
  )
  common.set_fast(config)
  if config.labels == 'all' or config.labels > 1000:
    config.batch_size = 32  # Or each label would be seen too rarely.
    config.steps = 16_000
  return config
