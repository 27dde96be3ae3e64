"""Run by test_vllm.py, in a process of its own: vLLM's engine on the CPU with tiny models of random weights.

    FLASH_ATTN_VLLM_OVERRIDE=CPU_ATTN python vllm_engine.py FOLDER

First with this library, which vLLM's plugins must have put in the place of CPU_ATTN, then with vLLM's own backend.
Prints one line of JSON: for each model what both generate, and how many calls had reached this library by then."""

import gc
import json
import sys

import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, LlamaConfig
from vllm import LLM, SamplingParams
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200}
GROUPS = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
MODELS = {
    "llama": LlamaConfig(**GROUPS, initializer_range=0.2, architectures=["LlamaForCausalLM"]),
    "softcap and windows": Gemma2Config(
        **GROUPS,
        **{"initializer_range": 0.2, "sliding_window": 40, "attn_logit_softcapping": 2.0},
        architectures=["Gemma2ForCausalLM"],
    ),
    "alibi": BloomConfig(
        **{"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 200, "initializer_range": 0.2},
        architectures=["BloomForCausalLM"],
    ),
}
LENGTHS = (3, 100, 17, 64, 1, 150, 40, 33, 90)  # longer than a step: prompts are cut into chunks


def weights(config, folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)  # so that a tied head does not repeat the last token for ever
    model.save_pretrained(folder)


def run(folder, **options):
    """The tokens of greedy generation, and their logprobs."""
    selector._cached_get_attn_backend.cache_clear()
    engine = LLM(
        folder,
        **{"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "seed": 0, "block_size": 32},
        **{"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8},
        **options,
    )
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 200, (n,), generator=random).tolist() for n in LENGTHS]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    outputs = [output.outputs[0] for output in outputs]
    chances = [[next(iter(step.values())).logprob for step in output.logprobs] for output in outputs]
    return {"tokens": [list(output.token_ids) for output in outputs], "logprobs": chances}


def main(folder):
    found, calls = {name: {} for name in MODELS}, []
    for name, config in MODELS.items():
        weights(config, f"{folder}/{name}")
    load_general_plugins()
    replaced = AttentionBackendEnum.CPU_ATTN.get_class()
    forward = replaced.get_impl_cls().forward

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    replaced.get_impl_cls().forward = counted
    for name in MODELS:
        found[name]["ours"] = run(f"{folder}/{name}")
    ours = len(calls)
    AttentionBackendEnum.CPU_ATTN.clear_override()
    for name in MODELS:
        found[name]["own"] = run(f"{folder}/{name}")
    own = len(calls) - ours
    # The last engine of the process: after it vLLM cannot make another one.
    register_backend(AttentionBackendEnum.CPU_ATTN, ".".join(replaced.full_cls_name()))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found["llama"]["drafts"] = run(f"{folder}/llama", speculative_config=drafts)
    calls = {"ours": ours, "own": own, "drafts": len(calls) - ours - own}
    print(json.dumps({"models": found, "backend": replaced.get_name(), "calls": calls}))


main(sys.argv[1])
