"""The forward pass of Llama-like decoders as one compiled function, for float32 on a CPU.

`vectors` has the building blocks that say exactly how numbers are added up, `kernels` what a
layer is made of, `step` the whole forward over one team of threads, `team` that team, and
`decoder` the model around it. Compiled by numba for the processor it runs on: nothing but pip
is needed, and no compiler.

Sums are added up in an order that depends on the model alone: not on the number of rows, of
threads or of vector lanes. So a row has the same bits whatever shares its step.
"""
