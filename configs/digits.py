"""Handwritten digits, 8×8, bundled with scikit-learn: runs anywhere.

  python main.py                                    # FlatMatch, 40 labels
  python main.py --config configs/digits.py:method=supervised --workdir runs/s

1,437 images to train on, 360 to test on.
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  config = common.base(arg, 'digits', paper_labels=(40, 100, 400))
  config.mean, config.std = (0.3053,), (0.3765,)
  config.model = 'wrn_10_1'
  config.batch_size = 32
  config.unlabeled_batch_size //= 2
  config.steps = 400
  config.learning_rate = 0.1
  # One pixel is an eighth of the image, and mirrored digits are other signs.
  config.pad = 0
  config.flip = False
  config.log_every = 20
  config.cpu_devices = 1  # Images so small lose more than they gain.
  config.probe_every = 0  # It compiles for longer than a run may take.
  config.eval_every = 50
  config.checkpoint_every = 200
  common.set_known(config.recipe_args, num_fixed=100)
  return config
