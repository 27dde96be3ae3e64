"""Hugging Face transformers on this library's attention: the five lines between the rules.

    python examples/transformers_generate.py                         a small model with random weights, made here
    python examples/transformers_generate.py Qwen/Qwen2.5-0.5B       a model's folder, or its name on the hub

The model then generates once more with PyTorch's attention, and the texts are compared. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import tempfile

try:
    import torch
    import transformers  # noqa: F401
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch transformers)") from None

PROMPTS = ["The capital of France is", "One day, a girl"]  # of unequal length: the shorter one is padded


def generate(folder: str, device: str) -> tuple[list[str], list[str]]:
    """The texts with this library's attention, and with PyTorch's."""
    # ------------------------------------------------------------------------------------------------------------------
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flash_attn_minimal.integrations import transformers as adapter

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=adapter.register()).to(device)
    # ------------------------------------------------------------------------------------------------------------------
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.decode([model.config.eos_token_id])
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt").to(device)
    texts = []
    for attention in (adapter.register(), "sdpa"):
        model.set_attn_implementation(attention)
        tokens = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts.append(tokenizer.batch_decode(tokens, skip_special_tokens=True))
    return texts[0], texts[1]


def write_random_model(folder: str) -> None:
    """A Llama of 0.2 M random numbers, and a tokenizer with one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 8}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=len(letters), num_key_value_heads=4, **shape, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", help="a causal language model (default: a Llama of random numbers)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if args.folder is None:
            write_random_model(made)
        ours, theirs = generate(args.folder or made, args.device)
    for text in ours:
        print(text)
    print("PyTorch's attention writes", "the same" if ours == theirs else f"something else: {theirs}")


if __name__ == "__main__":
    main()
