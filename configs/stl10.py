"""STL-10 at 96×96 with WRN-37-2, as in Table 1 of the paper.

python main.py --config configs/stl10.py --workdir runs/stl10
python main.py --config configs/stl10.py:method=flatmatch_e,labels=1000
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(arg, 'stl10', paper_labels=(40, 250, 1000))
  config.mean = (112.4 / 255, 109.1 / 255, 98.6 / 255)
  config.std = (68.4 / 255, 66.6 / 255, 68.5 / 255)
  config.model = 'wrn_37_2'
  config.pad = 12
  common.set_fairness(config, small=(40,))
  common.set_known(config.recipe_args, num_fixed=1000)
  return config
