"""Kernels of our own for processors, where torch's leave the memory idle or pass over it too often.

A decode step reads every weight once for few rows; torch's products do that at a third of the
memory's speed, and attention over pages needs the keys copied together first. `kernels.cpp` does
both in place. A training step of a small model makes many passes over memory beside its products,
of which most are spared. It is compiled on the machine it runs on, once (`gpt.native.build`), for
what the processor has; where there is no compiler, everything runs through torch, only slower.

    build       compiles, keeps the result on disk
    kernels     loads it, and calls what decodes
    linear      has a model's products take the fastest way for their number of rows
    blocks      has a block of few tokens run in few calls
    precision   float32 or bf16 weights; opens a model for serving
    hugepages   where served weights lie
    gradients   norms, turns, convolutions, bends and dropout of a training step
    causal      its attention
    orthogonal  Muon's step
    heap        keeps what a step frees

The attention is still `gpt.attention.attend`, which picks among kernels, of which two are here.
"""
