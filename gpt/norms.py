"""Normalisation of a vector's scale, where `GPTConfig` asks for it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.native import gradients


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight (Zhang & Sennrich, arXiv 1910.07467), with the weight in x's own type.

    Under autocast queries and keys are bf16 while the weight is float32; torch then warns and does
    not use its fused kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if (kernels := gradients.suit(x, self.weight)) is not None and self.eps is not None:
            return gradients.rms_norm(kernels, x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: GPTConfig) -> nn.Module:
    """The norm of the residual stream: over d_model."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
    return RMSNorm(config.d_model, eps=config.norm_eps)
