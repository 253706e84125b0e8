"""transformers' Trainer: train, evaluate, checkpoint, resume, accumulate, bf16."""

from __future__ import annotations

from pathlib import Path

import torch
from common import digest, losses, small_llama, tell, words, workspace
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = [torch.tensor(row) for row in words(count, 32)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def run(name: str, resume: bool = False, **settings):
    arguments = TrainingArguments(
        output_dir=str(Path(workspace(), name)),
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=3,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        seed=5,
        **settings,
    )
    trainer = Trainer(small_llama(), arguments, train_dataset=Rows(90), eval_dataset=Rows(21))
    trainer.train(resume_from_checkpoint=str(Path(workspace(), name, "checkpoint-3")) if resume else None)
    return trainer


plain = run("plain")
resumed = run("plain", resume=True)
accumulated = run("accumulated", gradient_accumulation_steps=3)
bfloat = run("bf16", bf16=True)
tell(
    losses=losses(plain),
    evaluation=plain.evaluate()["eval_loss"],
    weights=digest(trainer_model := plain.model),
    resumed_exactly=digest(resumed.model) == digest(trainer_model),
    accumulated=losses(accumulated),
    bf16=losses(bfloat),
)
