"""Your own images: labeled/CLASS/*, unlabeled/*, and test/CLASS/* if you can.

  python main.py --config configs/folder.py --config.data_dir=DIR
  python main.py --config configs/folder.py:image_size=96 --config.data_dir=DIR
  python main.py --config configs/folder.py:method=fixmatch,labels=40 \
      --config.data_dir=DIR

  python main.py --config configs/folder.py:model=resnet_18,image_size=128 \
      --config.data_dir=DIR --config.pretrained=resnet18.safetensors

Without an accelerator a small network trains for about 50 minutes of one core;
fast=true or fast=false after the colon chooses it or not.

All labeled images are used, or `labels` drawn from them. Without test/ hold
some labeled images out with --config.num_val=N. See docs/own_images.md.
"""

from flatmatch_jax.training import common


def get_config(arg=''):
  defaults = {
    'labels': 'all',
    'image_size': 32,
    'fast': 'auto',
    'model': 'auto',
  }
  config = common.base(arg, 'folder', paper_labels=(), **defaults)
  model = common.parse(arg, **defaults)['model']
  common.set_own(config, config.image_size, model)
  # ImageNet's: photos of any kind.
  config.mean = (0.485, 0.456, 0.406)
  config.std = (0.229, 0.224, 0.225)
  return config
