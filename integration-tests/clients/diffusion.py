"""A diffusers training loop: a small UNet learns to remove noise, with an EMA copy, saved and loaded again."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from common import digest, tell, workspace
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=workspace()))
set_seed(5)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    block_out_channels=(16, 16),
    layers_per_block=1,
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
    norm_num_groups=4,
)
average = EMAModel(model.parameters())
noise_scheduler = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 100)
images = torch.tensor(load_digits().images[:96], dtype=torch.float32).unsqueeze(1) / 8 - 1
loader = DataLoader(images, batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.register_for_checkpointing(average)
# the noise has a generator of its own: the libraries' loaders draw differently from torch's
random = torch.Generator().manual_seed(5 + accelerator.process_index)
seen = []
for clean in loader:
    noise = torch.randn(clean.shape, generator=random)
    steps = torch.randint(0, 50, (len(clean),), generator=random)
    with accelerator.accumulate(model):
        predicted = model(noise_scheduler.add_noise(clean, noise, steps), steps, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    average.step(model.parameters())
    seen.append(accelerator.gather(loss.detach()).mean().item())
accelerator.save_state(str(Path(workspace(), "saved")))
weights = digest(accelerator.unwrap_model(model))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
accelerator.wait_for_everyone()  # the peer's other ranks would read what rank 0 has not written yet
accelerator.load_state(str(Path(workspace(), "saved")))
back = digest(accelerator.unwrap_model(model)) == weights
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(str(Path(workspace(), "unet")))
accelerator.wait_for_everyone()
loaded = digest(UNet2DModel.from_pretrained(str(Path(workspace(), "unet")))) == weights
tell(losses=seen, weights=weights, loads_back=back, pretrained_loads=loaded)
accelerator.end_training()
