"""trl's supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from common import digest, losses, small_llama, tell, words, workspace
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

letters = Tokenizer(models.WordLevel({chr(number): number for number in range(128)}, unk_token="?"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="\x00", pad_token="\x01", unk_token="?")
arguments = SFTConfig(
    output_dir=str(Path(workspace(), "sft")),
    max_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    max_length=32,
    seed=5,
    gradient_checkpointing=False,
)
rows = Dataset.from_dict({"input_ids": words(120, 32)})
trainer = SFTTrainer(small_llama(), args=arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
tell(losses=losses(trainer), weights=digest(trainer.model))
