"""The one seam at which a model's linear layers are replaced.

`kinds` has the ways to multiply by a weight, `choice` measures which suits a shape, `install`
puts them into a model, `int4` keeps the weights of a GGUF file packed, and `tiled` makes the
result of a row independent of how many rows there are.
"""
