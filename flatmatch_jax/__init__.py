"""Semi-supervised image classification in JAX, with FlatMatch at its heart."""

import time

IMPORT_BEGAN = time.perf_counter()  # The log says how long starting took.
