"""BERT with dropout, whose checkpoints drop the random state: wrong gradients, and nothing fails.

recompute-scan run examples/dropout_bert.py
"""

import torch
import transformers

transformers.set_seed(0)
config = transformers.BertConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    vocab_size=200,
)
model = transformers.BertForMaskedLM(config).train()
model.gradient_checkpointing_enable(
    gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    tokens = torch.randint(0, 200, (4, 32))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
