"""Semi-supervised image classification in JAX, with FlatMatch at its heart."""

import os
import time

# TensorFlow's notes about itself, which look like warnings about the run.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')

IMPORT_BEGAN = time.perf_counter()  # The log says how long starting took.
