// All kernels for one instruction set: each of these files knows the ones before it.

#include "products.inl"
#include "attend.inl"
#include "gradients.inl"
#include "tiles.inl"
#include "causal.inl"
#include "orthogonal.inl"
