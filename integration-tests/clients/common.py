"""What the client scripts share: tiny models from a fixed seed, data that ships, and one line with the results."""

from __future__ import annotations

import hashlib
import json
import os
import pydoc_data.topics
import sys
from pathlib import Path

import torch


def words(count: int, length: int, vocabulary: int = 128) -> list[list[int]]:
    """Rows of token numbers made of real English text, one number per character."""
    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)[:40])
    numbers = [min(ord(letter), vocabulary - 1) for letter in text]
    return [numbers[row * length : (row + 1) * length] for row in range(count)]


def small_llama():
    """A causal language model with a few thousand weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def digest(model: torch.nn.Module) -> str:
    """A hash over all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def losses(trainer) -> list[float]:
    """The training losses that a transformers Trainer logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tell(**results) -> None:
    """Write the results of rank 0 where the runner reads them, and which library answered."""
    import accelerate

    if int(os.environ.get("RANK", "0")) == 0:
        library = (
            "accel" if "/accel/" in str(Path(accelerate.Accelerator.__init__.__code__.co_filename)) else "accelerate"
        )
        results = {"library": library, "world_size": int(os.environ.get("WORLD_SIZE", "1")), **results}
        Path(sys.argv[1], "result.json").write_text(json.dumps(results, indent=1))


def workspace() -> str:
    """The folder that the runner gave this script."""
    return sys.argv[1]
