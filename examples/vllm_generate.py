"""vLLM's engine on our attention: a small Llama of random weights.

    python examples/vllm_generate.py

The same tokens as transformers generates. Needs torch, transformers and vllm."""

import os
import tempfile

os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", FLASH_ATTN_VLLM_OVERRIDE="CPU_ATTN")
try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch transformers vllm)") from None
from flash_attn_minimal.integrations import vllm as adapter

sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=99, initializer_range=0.2)).eval()
options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128}
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    engine = LLM(folder, attention_backend=adapter.register(), **options)  # vLLM registers an installed package itself
prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3], list(range(90)))]
greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
for output in engine.generate(prompts, greedy, use_tqdm=False):
    ids = torch.tensor([output.prompt_token_ids])
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert output.outputs[0].token_ids == expected.tolist()
    print(f"after {ids.shape[1]} tokens {expected.tolist()}, as transformers generates")
