"""CIFAR-10 in less than an hour of one CPU core: docs/results.md.

  python main.py --config configs/cifar10_fast.py:labels=250 --workdir runs/fast
  python main.py --config configs/cifar10_fast.py:method=fixmatch,labels=4000

A network with 1.2 million parameters; 8,000 steps, or 16,000 with more than
1,000 labels.
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
