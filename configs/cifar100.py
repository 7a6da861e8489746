"""CIFAR-100 with WRN-28-8, as in Table 1 of the paper.

python main.py --config configs/cifar100.py --workdir runs/cifar100
python main.py --config configs/cifar100.py:method=flatmatch_e,labels=10000
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(
    arg, 'cifar100', paper_labels=(400, 2500, 10000), labels=400
  )
  config.mean = (129.3 / 255, 124.1 / 255, 112.4 / 255)
  config.std = (68.2 / 255, 65.4 / 255, 70.4 / 255)
  config.model = 'wrn_28_8'
  config.weight_decay = 1e-3
  common.set_fairness(config, small=(400,))
  common.set_known(config.recipe_args, num_fixed=2500)
  return config
