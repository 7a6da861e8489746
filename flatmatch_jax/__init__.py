"""Semi-supervised image classification in JAX, with FlatMatch at its heart."""
