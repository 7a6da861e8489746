"""ImageNet with 100 labels per class, read from TFDS step by step.

python main.py --config configs/imagenet.py --workdir runs/imagenet
python main.py --config configs/imagenet.py:method=fixmatch,model=vit_base_16

TFDS needs the two tar files of ILSVRC2012, which it may not download itself:
https://www.tensorflow.org/datasets/catalog/imagenet2012. The first run reads
all files once to index them.

The paper's row is labelled WRN-28-2, but FixMatch's error there is TorchSSL's
with ResNet-50, and batches and steps are not given; so ResNet-50 takes
TorchSSL's settings (fixmatch_imagenet_100000_0.yaml), with every method's own
ratio of unlabeled images. ViT-Base takes the only published recipe for ViTs in
this field, that of USB's usb_cv (STL-10's, which has a ViT-Base), which always
starts from pretrained weights: give them by --config.pretrained.
"""

from flatmatch_jax.training import common, run_length


def get_config(arg=''):
  defaults = {'labels': 100_000, 'model': 'resnet_50'}
  config = common.base(arg, 'imagenet', paper_labels=(100_000,), **defaults)
  config.model = common.parse(arg, **defaults)['model']
  config.variant.model = config.model
  config.mean = (0.485, 0.456, 0.406)
  config.std = (0.229, 0.224, 0.225)
  config.image_size = 224
  config.pad = 0  # Crops are made on the host.
  config.eval_every = config.checkpoint_every = 10_000
  if config.model.startswith('vit'):
    _set_vit(config)
  else:
    config.weight_decay = 3e-4
    run_length.follow(config, config, bn_momentum=0.9)  # Torch's 0.1.
    config.steps = 2_000_000
    _set_batch(config, 32)
  common.set_fairness(config, small=(100_000,))
  return config


def _set_vit(config):
  config.optimizer = 'adamw'
  config.learning_rate = 1e-4
  config.layer_decay = 0.65
  run_length.follow(config, config, warmup_steps=5120)
  config.weight_decay = 5e-4
  config.ema_decay = 0.0
  config.steps = 204_800
  _set_batch(config, 8)
  config.unlabeled_batch_size = 8


def _set_batch(config, size):
  """Keeps the method's ratio of unlabeled to labeled images."""
  ratio = config.unlabeled_batch_size // config.batch_size
  config.batch_size = size
  config.unlabeled_batch_size = ratio * size
