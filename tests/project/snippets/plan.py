import torch
import transformers

#: The document's model takes 40 s.
SMALLER = {
    "hidden_size=8192, num_hidden_layers=80": "hidden_size=64, num_hidden_layers=2",
    "intermediate_size=28672": "intermediate_size=128, vocab_size=1000",
    "num_attention_heads=64": "num_attention_heads=8",
    "(1, 2048)": "(1, 16)",
}

small_config = transformers.MixtralConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=1000,
)
Mixtral = transformers.MixtralForCausalLM
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=100)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(6).view(1, 6)
batch = {"input_ids": ids, "labels": ids}
