"""Small models that every parity test trains: one truth for all strategies.

Legend of shape suffixes: B batch, T time, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and a two-layer MLP.

    Keys have no bias: its gradient is zero in exact arithmetic, and Adam would blow rounding noise up to full steps.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        y_btd = self.norm1(x_btd)
        q_bhtk, k_bhtk, v_bhtk = (
            layer(y_btd).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        a_bhtk = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
        x_btd = x_btd + self.dropout(self.out(a_bhtk.transpose(1, 2).flatten(2)))
        return x_btd + self.dropout(self.down(F.gelu(self.up(self.norm2(x_btd)))))


class TinyTransformer(nn.Module):
    """A causal language model whose output layer shares the embedding's weight.

    Args:
        vocabulary: number of tokens.
        width: of the residual stream; divisible by `heads`.
        length: the longest sequence.
        dropout: 0 for parity tests.
    """

    def __init__(
        self,
        vocabulary: int = 64,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        length: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens_bt: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btd = self.embedding(tokens_bt) + self.position(positions)
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv: Tensor = self.logits(self.norm(x_btd))
        return logits_btv


def next_token_loss(logits_btv: Tensor, tokens_bt: Tensor) -> Tensor:
    """The mean cross entropy of each position's guess of the next token."""
    return F.cross_entropy(logits_btv[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())


TP_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "logits": "colwise_rep",
}
"""How the transformer's matrices are shared in tensor parallelism."""

TP_SEQUENCE_PLAN = {
    "embedding": "embedding_sequence",
    "position": "position_sequence",
    "blocks.*.norm?": "sequence_parallel",
    "blocks.*.query": "colwise_sequence",
    "blocks.*.key": "colwise_sequence",
    "blocks.*.value": "colwise_sequence",
    "blocks.*.out": "rowwise_sequence",
    "blocks.*.up": "colwise_sequence",
    "blocks.*.down": "rowwise_sequence",
    "norm": "sequence_parallel",
    "logits": "colwise_rep_sequence",
}
"""The same with activations shared along the sequence between the matrices."""


def chain_net(layers: int = 4) -> nn.Sequential:
    """A causal language model as a plain chain of layers, without positions and ties; the same values on every rank."""
    torch.manual_seed(0)
    blocks = [Block(32, 4, 0.0) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(64, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 64, bias=False))


def value_of(model: nn.Module) -> float:
    """The one number that all entries of all parameters are; fails where they differ, as in a state that is torn."""
    (value,) = {number for parameter in model.parameters() for number in parameter.reshape(-1).tolist()}
    return float(value)


class BufferedNet(nn.Module):
    """Two layers with a batch norm between them, so with buffers: 236 bytes, 64, 72 (40 of them buffers) and 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, 3]` to `[batch, 5]`."""
        y: Tensor = self.linear2(self.batchnorm(self.linear1(x)))
        return y
