"""CIFAR-10 with WRN-28-2, as in Table 1 of the paper.

python main.py --config configs/cifar10.py --workdir runs/
python main.py --config configs/cifar10.py:method=flatmatch_e,labels=250
python main.py --config configs/cifar10.py:method=fixmatch,labels=4000,seed=1
python main.py --config configs/cifar10.py:method=supervised,labels=all
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(arg, 'cifar10', paper_labels=(10, 40, 250, 4000))
  config.mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
  config.std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
  common.set_fairness(config, small=(10,))
  return config
