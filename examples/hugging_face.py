"""A model of ours in the Hugging Face world: build, train across segments, generate, save, load.

python examples/hugging_face.py
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM

from atlas_lm import AtlasCache, configure

torch.manual_seed(0)
config = configure("atlas", block="mag", size="tiny", vocab_size=100)
model = AutoModelForCausalLM.from_config(config)
print(f"{model.num_parameters():,} parameters")

# a long text in segments: the memory is carried on, gradients end at the borders
text = torch.randint(100, (2, 96))
following = torch.cat([text[:, 1:], torch.full((2, 1), -100)], dim=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cache = AtlasCache()
for segment, labels in zip(text.split(32, dim=1), following.split(32, dim=1), strict=True):
    out = model(segment, shift_labels=labels, past_key_values=cache, use_cache=True)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    cache = out.past_key_values.detach()  # leave detach() out for gradients through the whole text
    print(f"{int(cache.state.position[0])} tokens read, loss {out.loss.item():.2f}")

model.eval()
prompt = text[:, :10]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
made = model.generate(prompt, max_new_tokens=8, num_beams=2, do_sample=False)
assert torch.equal(made, again.generate(prompt, max_new_tokens=8, num_beams=2, do_sample=False))
print("generated", made[0, 10:].tolist())
