"""peft's LoRA in a plain loop and in the Trainer; only the adapter changes."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model, set_seed
from common import digest, small_llama, tell, words
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = small_llama()
before = digest(model.model.embed_tokens)
set_seed(11)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
rows = [torch.tensor(row) for row in words(64, 32)]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
seen = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seen.append(accelerator.gather(loss.detach()).mean().item())
bare = accelerator.unwrap_model(model)
assert is_peft_model(bare)
adapter = {name: tensor for name, tensor in accelerator.get_state_dict(model).items() if "lora_" in name}
tell(
    losses=seen,
    untouched=digest(bare.base_model.model.model.embed_tokens) == before,
    adapter_tensors=len(adapter),
    weights=sum(tensor.double().abs().sum().item() for tensor in adapter.values()),
)
accelerator.end_training()
