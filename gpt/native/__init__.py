"""Kernels of our own for decoding on a processor, where torch's leave the memory idle.

A decode step reads every weight once for few rows; torch's products do that at a third of the
memory's speed, and attention over pages needs the keys copied together first. `kernels.cpp` does
both in place. It is compiled on the machine it runs on, once (`gpt.native.build`), for what the
processor has; where there is no compiler, everything runs through torch as before, only slower.

    build    compiles, keeps the result on disk
    kernels  calls it
    linear   has a model's products take the fastest way for their number of rows

The attention is still `gpt.attention.attend`, which picks among kernels, of which one is here.
"""
