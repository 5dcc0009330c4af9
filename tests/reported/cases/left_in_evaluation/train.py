# TRL/unsloth kind (DEMAND has the KV cache side): rollouts switch the model to eval() and nobody switches it back; checkpointing on by flag, off in fact
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
m = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        use_cache=False,
    )
)
m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
m.train()
opt = torch.optim.AdamW(m.parameters(), 1e-3)


def rollout(p):
    m.eval()
    with torch.no_grad():
        out = m.generate(p, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return out  # train() forgotten


for step in range(30):
    seq = rollout(torch.randint(1, 128, (4, 8)))
    loss = m(seq, labels=seq).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
