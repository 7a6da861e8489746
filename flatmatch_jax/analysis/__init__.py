"""What a trained network looks like around its weights; arrays in and out.

Training never imports this. A loss is a function of the parameters alone: a
`jax.tree_util.Partial` that carries its images, so that compiled functions take
it as an argument and are compiled once for all images of one shape.

`python -m flatmatch_jax.analyze` writes, for each NAME of
`measures.ANALYSES`,

  DIR/analysis/NAME.npz, NAME.png, NAME.svg
  DIR/analysis/compared_NAME.png, .svg   in the first DIR, of several runs
"""
