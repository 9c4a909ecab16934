"""A decoder-only transformer in today's usual shape, cut into pipeline stages.

RMSNorm before each block, rotary positions, SwiGLU, grouped-query attention (Llama 2, arXiv:2307.09288), biases
on query, key and value only if asked for (Qwen2, arXiv:2407.10671). `canonical_name` gives each parameter the name it has in a Llama checkpoint; initial
weights are drawn per name, so they do not depend on how many stages or replicas there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import ModelConfig, ParallelConfig

ROPE_BASE = 10_000.0
NORM_EPS = 1e-5
INIT_STD = 0.02  # GPT-2's; projections back into the residual stream are scaled by 1/sqrt(2 layers)


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `vocab` comes from the tokenizer."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool
    qkv_bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig, vocab: int) -> Shape:
        """The shape that a configuration asks for."""
        return cls(vocab=vocab, tied=config.tied, qkv_bias=config.qkv_bias, **config.shape)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Contiguous layers of each stage; the first `layers % stages` stages hold one more.

    >>> stage_layers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    each, extra = divmod(layers, stages)
    starts = [stage * each + min(stage, extra) for stage in range(stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(stages)]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


def rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [seq_len, head_dim], halves repeated as Llama checkpoints expect (arXiv:2104.09864)."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (k, k + head_dim/2) of x [batch, heads, seq, head_dim] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with `kv_heads` shared key and value heads (arXiv:2305.13245)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        kv_dim = shape.kv_heads * self.head_dim
        self.grouped = shape.kv_heads != shape.heads
        self.q_proj = nn.Linear(shape.dim, shape.dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.dim, kv_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.dim, kv_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        batch, seq, dim = x.shape
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, dim))
        return projected


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.dim)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.dim)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]; the residual stream keeps x's dtype."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStage(nn.Module):
    """Layers `layers` of the decoder, with the embedding if first and norm and head if last.

    forward: tokens int64 [batch, seq] on the first stage, else fp32 activations [batch, seq, dim];
    returns fp32 activations, or fp32 logits [batch, seq, vocab] on the last stage.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, layers: range, seq_len: int, *, autocast_bf16: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.is_first = layers.start == 0
        self.is_last = layers.stop == shape.layers
        self.autocast_bf16 = autocast_bf16
        if self.is_first:
            self.embed_tokens = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleDict({str(index): Layer(shape) for index in layers})
        if self.is_last:
            self.norm = RMSNorm(shape.dim)
            self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)
            if shape.tied:
                self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rotary_tables(seq_len, shape.dim // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class docstring for shapes."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast_bf16):
            if self.is_first:
                x = self.embed_tokens(x)
            for layer in self.layers.values():
                x = layer(x, self.cos, self.sin)
            if self.is_last:
                x = self.lm_head(self.norm(x)).float()
            return x


def build_pieces(
    shape: Shape,
    parallel: ParallelConfig,
    stage: int,
    seq_len: int,
    seed: int,
    *,
    autocast_bf16: bool = False,
) -> list[DecoderStage]:
    """What the rank of pipeline stage `stage` holds: one piece, or several that lie `stages` pieces apart."""
    pieces = parallel.stages * parallel.pieces
    return [
        build_stage(shape, piece, pieces, seq_len, seed, autocast_bf16=autocast_bf16)
        for piece in range(stage, pieces, parallel.stages)
    ]


def canonical_name(name: str) -> str:
    """The parameter's name in a Llama checkpoint.

    >>> canonical_name("layers.3.mlp.up_proj.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    return name if name.startswith("lm_head") else f"model.{name}"


def build_stage(
    shape: Shape, stage: int, stages: int, seq_len: int, seed: int, *, autocast_bf16: bool = False
) -> DecoderStage:
    """Stage `stage` of `stages` with its initial weights, which depend on `seed` and each name only."""
    module = DecoderStage(
        shape, stage_layers(shape.layers, stages)[stage], seq_len, autocast_bf16=autocast_bf16
    )
    residual_std = INIT_STD / math.sqrt(2 * shape.layers)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # biases, norm gains
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
            parameter.normal_(0.0, std, generator=named_generator(seed, canonical_name(name)))
    return module


def named_generator(seed: int, *names: object) -> torch.Generator:
    """A generator that depends on `seed` and `names` only: not on the rank, nor on what was drawn before."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def count_parameters(shape: Shape) -> int:
    """Parameters of the whole model; built on the meta device, so nothing is allocated."""
    with torch.device("meta"):
        whole = DecoderStage(shape, range(shape.layers), seq_len=2)
    return sum(parameter.numel() for parameter in whole.parameters())


def parameter_hash(parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """sha256 (hex) over names and raw bytes in order of name: equal hashes, equal bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dict(parameters).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()
