"""transformers' models with this library's attention: a tiny model of each family with random weights, in float32,
compared with the attention that transformers uses by default."""

import copy
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers is not installed")

from flash_attn_minimal import masks  # noqa: E402
from flash_attn_minimal.integrations import transformers as adapter  # noqa: E402

NAME = adapter.register()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {"num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128}
DECODER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
V5 = int(transformers.__version__.split(".")[0]) >= 5


def config_of(family):
    if family == "llama":
        return transformers.LlamaConfig(**DECODER)
    if family == "mistral":
        return transformers.MistralConfig(**DECODER, sliding_window=5)
    if family == "gemma2":  # alternate layers have the window
        return transformers.Gemma2Config(**DECODER, head_dim=8, sliding_window=5, attn_logit_softcapping=0.5)
    if family == "gpt_oss":
        layers = ["sliding_attention", "full_attention"]
        sizes = {"head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
        return transformers.GptOssConfig(**DECODER, **sizes, layer_types=layers)
    assert family == "llama4"
    sizes = {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}
    return transformers.Llama4TextConfig(**DECODER, **sizes, no_rope_layers=[1, 0])


DECODERS = {  # name -> (class, the attention of transformers that can run it)
    "llama": ("LlamaForCausalLM", "sdpa"),
    "mistral": ("MistralForCausalLM", "sdpa"),
    "gemma2": ("Gemma2ForCausalLM", "eager"),  # sdpa knows no softcap
    "gpt_oss": ("GptOssForCausalLM", "eager"),  # nor sinks
    "llama4": ("Llama4ForCausalLM", "sdpa"),
}


@pytest.fixture(scope="module")
def models():
    """made(family): (the model with this library's attention, the same weights with transformers' attention)."""
    made = {}

    def pair(family):
        if family not in made:
            name, other = DECODERS[family]
            torch.manual_seed(0)
            theirs = getattr(transformers, name)._from_config(config_of(family), attn_implementation=other)
            with torch.no_grad():
                for parameter in theirs.parameters():  # scores that differ, and sinks that count
                    parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0))
            made[family] = twins(theirs)
        return made[family]

    return pair


def twins(theirs):
    theirs = theirs.to(DEVICE).eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(NAME)
    if ours.config._attn_implementation != NAME:  # transformers has logged it
        pytest.skip(f"the {type(ours).__name__} of this transformers asks no AttentionInterface")
    return ours, theirs


def tokens(*shape, seed=0):
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padding(side, lengths, longest):
    rows = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in zip(rows, lengths, strict=True):
        row[longest - length :] = side == "left"
        row[:length] |= side == "right"
    return rows.to(DEVICE)


def close(got, expected, rows=None, tolerance=2e-5):
    if rows is not None:
        got, expected = got[rows.bool()], expected[rows.bool()]
    scale = float(expected.detach().abs().max())
    assert scale > 1e-6
    np.testing.assert_allclose(
        got.detach().float().cpu().numpy(), expected.detach().float().cpu().numpy(), rtol=0, atol=tolerance * scale
    )


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours, theirs, losses):
    mine, expected = (gradients(model, loss) for model, loss in zip((ours, theirs), losses, strict=True))
    assert mine.keys() == expected.keys() and mine
    for name, gradient in expected.items():
        if float(gradient.abs().max()) > 1e-5:
            close(mine[name], gradient, tolerance=2e-4)


class Watch:
    """Records the masks that the layers of a model get."""

    def __init__(self, monkeypatch):
        self.masks = []
        original = adapter._attend

        def attend(q, k, v, mask, *rest):
            self.masks.append(mask)
            return original(q, k, v, mask, *rest)

        monkeypatch.setattr(adapter, "_attend", attend)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_logits_and_gradients_of_decoders(models, watch, family, side):
    ours, theirs = models(family)
    ids = tokens(3, 13)
    given = None if side == "none" else padding(side, (13, 6, 9), 13)
    counted = torch.ones_like(ids) if given is None else given
    with torch.no_grad():
        close(ours(ids, attention_mask=given).logits, theirs(ids, attention_mask=given).logits, counted)
    assert watch.masks and all(mask.pack_rows == (side != "none") for mask in watch.masks)
    losses = [
        (torch.log_softmax(model(ids, attention_mask=given).logits, -1)[..., 7] * counted).sum()
        for model in (ours, theirs)
    ]
    same_gradients(ours, theirs, losses)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_packed_documents(models, watch, family):
    """position_ids that begin again separate documents, without an array of all pairs."""
    ours, theirs = models(family)
    lengths = (7, 1, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    ids = tokens(1, sum(lengths))
    got = ours(ids, position_ids=positions, use_cache=False).logits
    assert watch.masks and all(mask.documents is not None for mask in watch.masks)
    close(got, theirs(ids, position_ids=positions, use_cache=False).logits)
    first = 0
    for n in lengths:
        close(got[:, first : first + n], ours(ids[:, first : first + n]).logits)
        first += n
    losses = [
        torch.log_softmax(model(ids, position_ids=positions, use_cache=False).logits, -1)[..., 7].sum()
        for model in (ours, theirs)
    ]
    same_gradients(ours, theirs, losses)


def test_packed_documents_by_lengths(models):
    """With the lengths that DataCollatorWithFlattening gives besides the positions."""
    ours, theirs = models("llama")
    ids = tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(DEVICE)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7}
    got = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    close(got, theirs(ids, position_ids=positions, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_prompt_shared_by_answers(models, family):
    """The prompt once, with a mask by intervals, against the prompt before every answer: logits and gradients."""
    ours, theirs = models(family)
    if family == "gpt_oss":  # its window counts rows, and the answers are apart from the prompt's rows
        ours, theirs = (copy.deepcopy(x) for x in (ours, theirs))
        for model in (ours, theirs):
            model.config.layer_types = ["full_attention"] * 2
            for layer in model.model.layers:
                layer.self_attn.sliding_window, layer.attention_type = None, "full_attention"
    prompt, answers = tokens(1, 9), [tokens(1, n, seed=n) for n in (4, 7, 1)]
    lengths = [x.shape[1] for x in answers]
    positions = torch.tensor(masks.shared_prompt_positions([9], [lengths]), device=DEVICE)[None]
    indices = masks.shared_prompt([9], [lengths], like=prompt)["startend_row_indices"]
    once = ours(torch.cat([prompt, *answers], 1), position_ids=positions, startend_row_indices=indices, use_cache=False)
    got, losses = once.logits[:, 9:].split(lengths, 1), [once.logits[:, 9:].sin().sum(), 0]
    for answer, logits in zip(answers, got, strict=True):
        expected = theirs(torch.cat([prompt, answer], 1), use_cache=False).logits[:, 9:]
        close(logits, expected)
        losses[1] = losses[1] + expected.sin().sum()
    same_gradients(ours, theirs, losses)


def test_compiled_layers_take_a_mask_by_intervals(models):
    """In a compiled model transformers' mask is an array, which may hide more than causal does."""
    ours, _ = models("llama")
    ids = tokens(1, 9)
    given = {"startend_row_indices": masks.shared_prompt([3], [[2, 4]], like=ids)["startend_row_indices"]}
    given |= {"position_ids": torch.tensor(masks.shared_prompt_positions([3], [[2, 4]]), device=DEVICE)[None]}
    expected = ours(ids, use_cache=False, **given).logits
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="attention_mask is a tensor.*compile the layers"):
        torch.compile(ours, backend="eager")(ids, use_cache=False, **given)
    ours = copy.deepcopy(ours)
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    close(ours(ids, use_cache=False, **given).logits, expected)


@pytest.mark.parametrize("beside", ["padding", "lengths", "cache"])
def test_a_mask_by_intervals_decides_alone(models, beside):
    ours, _ = models("llama")
    ids = tokens(2 if beside == "padding" else 1, 8)
    indices = masks.documents([3, 5], like=ids)["startend_row_indices"]
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    more = {
        "padding": {"attention_mask": padding("left", (8, 6), 8)},
        "lengths": {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5},
        "cache": {"past_key_values": ours(ids).past_key_values},
    }[beside]
    names = {"padding": "attention_mask", "lengths": "cu_seq_lens_q", "cache": "a cache"}
    with pytest.raises(NotImplementedError, match=f"{names[beside]}.*startend_row_indices|startend_row_indices.*cache"):
        ours(ids, startend_row_indices=indices, use_cache=beside == "cache", **more)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("how", ["greedy", "beams", "static"])
def test_generate_with_padding(models, family, how):
    ours, theirs = models(family)
    ids, given = tokens(3, 7), padding("left", (7, 3, 5), 7)
    ids = ids * given
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_scores": True}
    options |= {"return_dict_in_generate": True, "attention_mask": given, "disable_compile": True}
    options |= {"beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}, "greedy": {}}[how]
    try:
        expected = theirs.generate(ids, **options)
    except TypeError as error:
        pytest.skip(f"this transformers fails by itself: {error}")  # 5.17: Llama 4 with a static cache
    got = ours.generate(ids, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    if how == "static":  # as the engine of transformers passes it, also without padding
        options |= {"attention_mask": torch.ones_like(ids)}
        ids = tokens(3, 7)
        again, expected = ours.generate(ids, **options), theirs.generate(ids, **options)
        assert again.sequences.tolist() == expected.sequences.tolist()
    for mine, other in zip(got.scores, expected.scores, strict=True) if how == "greedy" else ():
        close(mine, other)


def test_a_padded_step_copies_no_keys(models, watch, monkeypatch):
    """Steps of generate use the kernels for caches, and pass padding as numbers."""
    ours, _ = models("llama")
    calls = []
    original = adapter.flash_attn_with_kvcache
    monkeypatch.setattr(adapter, "flash_attn_with_kvcache", lambda *a, **k: calls.append(k) or original(*a, **k))
    ours.generate(tokens(2, 7), attention_mask=padding("left", (7, 3), 7), max_new_tokens=3, do_sample=False)
    assert len(calls) == 2 * 2  # layers, steps after the first
    assert all(call["cache_leftpad"].tolist() == [0, 4] and call["causal"] for call in calls)
    assert not any(isinstance(mask, torch.Tensor) for mask in watch.masks)


def test_chunks_of_a_prompt(models):
    """A prompt in two parts: the second has several rows, but not all."""
    ours, theirs = models("mistral")
    ids, given = tokens(2, 40), padding("left", (40, 25), 40)
    logits = []
    for model in (ours, theirs):
        with torch.no_grad():
            past = model(ids[:, :18], attention_mask=given[:, :18], use_cache=True).past_key_values
            logits.append(model(ids[:, 18:], attention_mask=given, past_key_values=past).logits)
    close(*logits, given[:, 18:])


def test_padding_with_holes_and_own_masks(models):
    ours, theirs = models("mistral")
    ids = tokens(2, 9)
    given = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9], device=DEVICE)
    with torch.no_grad():
        close(ours(ids, attention_mask=given).logits, theirs(ids, attention_mask=given).logits, given)
        sees = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
        sees |= torch.eye(9, dtype=torch.bool, device=DEVICE)
        close(ours(ids, attention_mask=sees).logits, theirs(ids, attention_mask=sees).logits)
        added = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
        close(ours(ids, attention_mask=added).logits, theirs(ids, attention_mask=added).logits)


def test_sinks_in_the_models_dtype(models):
    ours, theirs = (copy.deepcopy(model).to(torch.bfloat16) for model in models("gpt_oss"))
    assert ours.model.layers[0].self_attn.sinks.dtype == torch.bfloat16
    ids = tokens(2, 9)
    losses = [model(ids).logits.float().square().mean() for model in (ours, theirs)]
    close(losses[0], losses[1], tolerance=0.1)
    mine, expected = (gradients(model, loss) for model, loss in zip((ours, theirs), losses, strict=True))
    name = "model.layers.0.self_attn.sinks"
    assert mine[name].dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(mine[name].float(), expected[name].float(), 0) > 0.9


def test_dropout_is_the_generators(models):
    ours = copy.deepcopy(models("llama")[0]).train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = tokens(1, 9)
    torch.manual_seed(3)
    first, second = ours(ids).logits, ours(ids).logits
    torch.manual_seed(3)
    assert torch.equal(ours(ids).logits, first) and not torch.equal(first, second)


def test_gradient_checkpointing(models):
    ours, theirs = (copy.deepcopy(model).train() for model in models("mistral"))
    ours.gradient_checkpointing_enable()
    ids, given = tokens(2, 9), padding("right", (9, 4), 9)
    losses = [
        (model(ids, attention_mask=given, use_cache=False).logits[..., 7] * given).sum() for model in (ours, theirs)
    ]
    same_gradients(ours, theirs, losses)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_compiled_whole(models, family):
    """torch.compile, the forward pass in one graph."""
    ours, theirs = models(family)
    if family == "gpt_oss":
        ours, theirs = (model.model.layers[1].self_attn for model in (ours, theirs))
        x = torch.randn(1, 9, 32, device=DEVICE)
        angles = torch.randn(1, 9, 4, device=DEVICE)
        mask = adapter.Mask((1, 1, 9, 9), ends=9)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        got = compiled(x, (angles.cos(), angles.sin()), attention_mask=mask)[0]
        close(got, ours(x, (angles.cos(), angles.sin()), attention_mask=mask)[0])
        return
    ids = tokens(2, 9)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    close(compiled(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)


def test_compiled_steps_over_a_static_cache(models):
    """One graph for all steps, as generate makes it on a GPU. The mask of a step is an argument of the graph."""
    ours, theirs = models("llama")
    if not V5:
        pytest.skip("the cache of transformers 4 asks for more arguments")
    torch._dynamo.reset()
    ids = tokens(2, 5)
    found = []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for model in (ours, theirs):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            steps = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
            step = torch.compile(model, backend=counter, fullgraph=True) if model is ours else model
            for i in range(4):
                token = steps[-1].argmax(-1, keepdim=True)
                inputs = model.prepare_inputs_for_generation(
                    token, past_key_values=cache, attention_mask=torch.ones(2, 6 + i, dtype=torch.long, device=DEVICE)
                )
                inputs |= {"input_ids": token}
                steps.append(step(**inputs).logits[:, -1])
        found.append(torch.stack(steps))
    close(*found)
    assert counter.frame_count == 1


def test_vit(watch):
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4)
    torch.manual_seed(0)
    ours, theirs = twins(transformers.ViTModel._from_config(config, attn_implementation="sdpa"))
    image = torch.randn(2, 3, 12, 12, device=DEVICE)
    states = [model(image).last_hidden_state for model in (ours, theirs)]
    assert watch.masks
    close(*states)
    same_gradients(ours, theirs, [(x * x.cos()).sin().sum() for x in states])


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_bert(watch, side):
    config = transformers.BertConfig(**SIZES, vocab_size=50, max_position_embeddings=32)
    torch.manual_seed(0)
    ours, theirs = twins(transformers.BertModel._from_config(config, attn_implementation="sdpa"))
    ids = tokens(3, 11)
    given = None if side == "none" else padding(side, (11, 4, 8), 11)
    with torch.no_grad():
        close(ours(ids, given).last_hidden_state, theirs(ids, given).last_hidden_state)
    if V5:
        assert watch.masks
    states = [model(ids, given).last_hidden_state for model in (ours, theirs)]
    same_gradients(ours, theirs, [(x * x.cos()).sin().sum() for x in states])


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 50}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
    sizes |= {"max_source_positions": 12, "max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
    config = transformers.WhisperConfig(**sizes, bos_token_id=1, eos_token_id=2, suppress_tokens=None)
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.generation_config.update(begin_suppress_tokens=None, suppress_tokens=None)
    return twins(model)


def test_whisper(watch):
    ours, theirs = whisper()
    sound, ids = torch.randn(2, 8, 24, device=DEVICE), tokens(2, 6)
    logits = [model(input_features=sound, decoder_input_ids=ids).logits for model in (ours, theirs)]
    close(*logits)
    assert {mask.causal for mask in watch.masks} == {True, False}
    same_gradients(ours, theirs, [torch.log_softmax(x, -1)[..., 7].sum() for x in logits])
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}):
        written = [model.generate(sound, max_new_tokens=6, **options) for model in (ours, theirs)]
        written = [x["sequences"] if isinstance(x, dict) else x for x in written]
        assert written[0].tolist() == written[1].tolist()


def test_t5(watch):
    """Its bias is learned."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    kind = transformers.T5ForConditionalGeneration
    if "attention_interface" not in inspect.getsource(transformers.models.t5.modeling_t5.T5Attention.forward):
        pytest.skip("the T5 of this transformers asks no AttentionInterface")
    torch.manual_seed(0)
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation="eager").to(DEVICE).eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation=NAME).to(DEVICE).eval()
    ours.load_state_dict(theirs.state_dict())
    ids, given, written = tokens(3, 9), padding("right", (9, 4, 7), 9), tokens(3, 5, seed=1)
    logits = [model(ids, attention_mask=given, decoder_input_ids=written).logits for model in (ours, theirs)]
    assert watch.masks
    close(*logits)
    losses = [torch.log_softmax(x, -1)[..., 7].sum() for x in logits]
    same_gradients(ours, theirs, losses)
    assert any("relative_attention_bias" in name for name, p in ours.named_parameters() if p.grad is not None)
    options = {"attention_mask": given, "max_new_tokens": 6, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == theirs.generate(ids, **options).tolist()


# ---- options that a model passes on ----


SPARSE = DECODER | {"pad_token_id": 0, "eos_token_id": 2, "head_dim": 8}


def sparse(module, kind, **sizes):
    """A model of a newer transformers, with this library's attention and with eager attention."""
    package = pytest.importorskip(f"transformers.models.{module}", reason=f"this transformers has no {module}")
    modeling = pytest.importorskip(f"{package.__name__}.modeling_{module}")
    configuration = pytest.importorskip(f"{package.__name__}.configuration_{module}")
    name = kind.replace("Model", "Config")
    config = getattr(configuration, name)(**{**SPARSE, **sizes})
    torch.manual_seed(0)
    theirs = getattr(modeling, kind)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0))
    return twins(theirs)


def test_a_choice_of_keys_is_not_lost():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48, "rotary_dim": 4}
    sizes |= {"shared_intermediate_size": 48, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4}
    sizes |= {"index_topk_blocks": 2, "index_local_blocks": 1, "layer_types": ["minimax_m3_sparse"] * 2}
    ours, _ = sparse("minimax_m3_vl", "MiniMaxM3VLTextModel", **sizes)
    with pytest.raises(NotImplementedError, match="block_indices is given, torch.int64 of shape"):
        ours(tokens(2, 40))


def test_sinks_of_rows_are_not_lost():
    ours, _ = sparse("inkling2", "Inkling2TextModel")
    with pytest.raises(NotImplementedError, match="sinks is given, torch.float32 of shape"):
        ours(tokens(2, 40))


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
@pytest.mark.parametrize("side", [None, "left"])
def test_layers_that_append_columns_to_their_mask(kind, side):
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "o_lora_rank": 8}
    sizes |= {"o_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"n_shared_experts": 1, "index_topk": 3, "index_head_dim": 8, "index_n_heads": 2, "sliding_window": 8}
    sizes |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    ours, theirs = sparse("deepseek_v4", "DeepseekV4Model", **sizes, layer_types=[kind] * 2)
    ids, given = tokens(2, 40), padding(side, (40, 33), 40) if side else None
    with torch.no_grad():
        got, expected = (model(ids, attention_mask=given).last_hidden_state for model in (ours, theirs))
    close(got, expected, given)


@pytest.mark.parametrize("side", [None, "left"])
def test_layers_that_calculate_with_their_mask(side):
    ours, theirs = sparse("doge", "DogeModel")
    ids, given = tokens(2, 9), padding(side, (9, 6), 9) if side else None
    with torch.no_grad():
        got, expected = (model(ids, attention_mask=given).last_hidden_state for model in (ours, theirs))
    close(got, expected, given)


def call(mask=None, rows=5, keys=7, **options):
    module = torch.nn.Module()
    q, k = torch.randn(2, 4, rows, 8, device=DEVICE), torch.randn(2, 2, keys, 8, device=DEVICE)
    return adapter.attention(module, q, k, k, mask, **options)[0]


def test_arguments_without_effect_are_taken():
    positions = torch.arange(5, device=DEVICE)[None]
    given = {"position_ids": positions, "num_items_in_batch": torch.tensor(3), "use_cache": True, "some_name": "text"}
    call(**given, position_embeddings=(positions, positions), output_attentions=None, sinks=None)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.zeros(2, 5), "torch.float32 of shape (2, 5)"),
        ([None, torch.zeros(1)], "a list of tensors"),
        ({"a": (torch.zeros(1),)}, "a dict of tensors"),
    ],
    ids=["tensor", "list", "dict"],
)
def test_unknown_tensors_are_refused(value, kind):
    with pytest.raises(NotImplementedError) as caught:
        call(chosen=value)
    assert str(caught.value).startswith(f"chosen is given, {kind}: ")


def test_masks_of_other_sizes_are_refused():
    ones = torch.ones(2, 1, 5, 9, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 5, 9\): .* 5 rows of query and 7 of key"):
        call(ones)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 4, 7\)"):
        call(ones[:, :, :4, :7])
    for shape in ((2, 1, 5, 6), (2, 1, 4, 7)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .* are for other rows or keys"):
            call(adapter.Mask(shape, ends=shape[-1]))
    with pytest.raises(ValueError, match="position_bias has shape"):
        call(position_bias=torch.zeros(1, 4, 5, 6, device=DEVICE))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(\)"):
        call(ones[0, 0, 0, 0])
    with pytest.raises(ValueError, match="attention_mask is a ndarray"):
        call(ones[:, :, :, :7].cpu().numpy())
    assert torch.isfinite(call(ones[:, :, :1, :1])).all()


def test_masks_of_integers_are_refused():
    mask = torch.ones(2, 1, 5, 7, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="attention_mask is torch.int64: expected bool or floating point"):
        call(mask)
    with pytest.raises(ValueError, match="attention_mask is torch.int64"):
        call(mask, position_bias=torch.zeros(1, 4, 5, 7, device=DEVICE))


def test_packed_sequences_keep_what_they_are_given():
    """Chunks count from the beginning of a sequence. Options that packed sequences do not have are refused."""
    starts = torch.tensor([0, 6, 10], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 10, 8, device=DEVICE)
    module = torch.nn.Module()

    def packed(mask, **more):
        return adapter.attention(module, q, k, v, mask, **lengths | more)[0]

    got = packed(adapter.Mask((1, 1, 10, 10), chunk=4, ends=10))
    for begin, end in ((0, 6), (6, 10)):
        part = (x[:, :, begin:end] for x in (q, k, v))
        mask = adapter.Mask((1, 1, end - begin, end - begin), chunk=4, ends=end - begin)
        close(got[:, begin:end], adapter.attention(module, *part, mask)[0])
    with pytest.raises(ValueError, match="max_length_k is None: packed sequences need"):
        packed(None, max_length_k=None)
    with pytest.raises(NotImplementedError, match="position_bias is given with cu_seq_lens_q"):
        packed(None, position_bias=torch.zeros(1, 4, 10, 10, device=DEVICE))
    with pytest.raises(NotImplementedError, match="attention_mask hides padding, but cu_seq_lens_q is given"):
        packed(adapter.Mask((1, 1, 10, 10), ends=10, starts=torch.tensor([2], device=DEVICE)))


@pytest.mark.parametrize("side", [None, "left"])
def test_autocast_is_that_of_sdpa(models, side):
    """Rotary embeddings leave q and k in float32 beside a bfloat16 v."""
    ours, theirs = models("llama")
    ids, given = tokens(2, 9), padding(side, (9, 6), 9) if side else None
    counted = torch.ones_like(ids) if given is None else given
    with torch.autocast(DEVICE, torch.bfloat16):
        got, expected = (model(ids, attention_mask=given).logits for model in (ours, theirs))
        assert call().dtype == torch.bfloat16
    close(got, expected, counted, tolerance=5e-2)
    losses = [(torch.log_softmax(x.float(), -1)[..., 7] * counted).sum() for x in (got, expected)]
    mine, other = (gradients(model, loss) for model, loss in zip((ours, theirs), losses, strict=True))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.nn.functional.cosine_similarity(mine[name].flatten(), other[name].flatten(), 0) > 0.98


def test_a_float_mask_of_another_dtype():
    mask = torch.randn(2, 1, 5, 7, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).half()
    torch.manual_seed(0)
    want = call(mask.float())
    torch.manual_seed(0)
    assert torch.equal(call(mask), want)


# ---- names and masks ----


def test_a_name_with_flash_in_it_is_a_kernel_to_download(monkeypatch):
    """The reason for the adapter's name: for a name with "flash" in it, transformers looks for a kernel to download."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_minimal", adapter.attention)
    model = transformers.LlamaForCausalLM._from_config(config_of("llama"), attn_implementation="sdpa")
    if V5:
        with pytest.raises((ImportError, ValueError, OSError)):
            model.set_attn_implementation("flash_minimal")
    assert "flash" not in NAME


@pytest.mark.parametrize("name", ["flash_minimal", "my_sdpa", "flex_attention_2", "paged|mine", "a/b", "", "eager"])
def test_names_that_mean_something(name):
    with pytest.raises(ValueError, match=f"name={name!r}".replace("|", r"\|")):
        adapter.register(name)


def test_register_twice_and_under_another_name(monkeypatch):
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    assert adapter.register() == NAME and adapter.register("mine") == "mine"
    transformers.AttentionInterface.register("theirs", lambda *_: None)
    with pytest.raises(ValueError, match="name='theirs' is the name of another"):
        adapter.register("theirs")


FORMS = {
    "causal": ("causal_mask_function", ()),
    "window": ("sliding_window_causal_mask_function", (4,)),
    "full": ("bidirectional_mask_function", ()),
    "full window": ("sliding_window_bidirectional_mask_function", (3,)),
    "chunks": ("chunked_causal_mask_function", (4, torch.zeros(3, dtype=torch.long))),
}


LENGTHS = [(9, 9, 0), (1, 9, 8), (4, 9, 5), (4, 12, 0), (3, 12, 5)]


@pytest.mark.parametrize(
    ("form", "lengths"), [(f, n) for f in FORMS for n in LENGTHS if "full" not in f or n[0] == n[1]]
)
@pytest.mark.parametrize("side", [None, "left", "right", "holes"])
def test_masks_say_what_transformers_arrays_say(form, lengths, side):
    """lengths: q_length, kv_length, q_offset. 12 keys are those of a static cache."""
    from transformers import masking_utils

    name, made_with = FORMS[form]
    if not V5:
        pytest.skip("transformers 4 makes masks from cache_position")
    function = getattr(masking_utils, name)
    q_length, kv_length, q_offset = lengths
    tokens_ = q_length + q_offset
    rows = None if side is None else padding(side, (tokens_, tokens_ - 1, 3), tokens_).bool().cpu()
    if side == "holes":
        rows = torch.ones(3, tokens_, dtype=torch.bool)
        rows[1, 2] = False
    if form == "chunks":
        made_with = (4, torch.zeros(3, dtype=torch.long) if rows is None else (rows.cumsum(-1) == 0).sum(-1))
    if made_with:
        function = function(*made_with)
    given = {"batch_size": 3, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    given |= {"mask_function": function, "attention_mask": rows}
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = masking_utils.sdpa_mask(**given, **skips)
    mask = adapter.attention_mask(**given, **skips, device="cpu")
    if isinstance(mask, torch.Tensor):
        assert side in ("holes", "right"), "an array for a mask that has a form"
        assert torch.equal(mask, expected)
        return
    assert isinstance(mask, adapter.Mask)
    got = mask.array(torch.device("cpu")).expand(expected.shape)
    if mask.pack_rows:  # rows of padding do not exist
        counted = rows[:, None, :, None]
        got, expected = got & counted, expected & counted
    assert torch.equal(got, expected)
    static = {**given, "q_offset": torch.tensor(q_offset)}  # as static caches give it
    again = adapter.attention_mask(**static, **skips, device="cpu")
    assert isinstance(again, adapter.Mask)
    got_again = again.array(torch.device("cpu")).expand(got.shape)
    assert torch.equal(got_again & counted if mask.pack_rows else got_again, got)


def test_a_mask_moves_as_a_tensor_does():
    mask = adapter.Mask((2, 1, 1, 5), ends=torch.tensor([5, 5]), starts=torch.tensor([0, 2]))
    moved = mask.to("meta", torch.float16)
    assert {moved.ends.device.type, moved.starts.device.type} == {"meta"} and moved.starts.dtype == torch.int64
    assert moved.shape == mask.shape and moved.causal and mask.to(torch.float16) is mask is mask.contiguous()


def test_unknown_masks_stay_arrays(models):
    from transformers import masking_utils

    ours, theirs = models("llama")
    with torch.no_grad():
        for model in (ours, theirs):
            model.found = masking_utils.create_causal_mask(
                model.config, torch.zeros(1, 6, 32), None, past_key_values=None,
                or_mask_function=lambda b, h, q, k: k < 3, **({} if V5 else {"cache_position": torch.arange(6)}),
            )  # fmt: skip
    assert isinstance(ours.found, torch.Tensor) and torch.equal(ours.found, theirs.found)


# ---- continuous batching ----


@pytest.mark.parametrize("longest", ["max_length", "max_seqlen"])  # from 5.23, and to 5.17
def test_a_step_of_continuous_batching(longest):
    """A layer with all the arguments that transformers passes, over an empty cache."""

    class Cache:
        def update(self, key_states, value_states, **_):
            last = longest == "max_length"
            return tuple(x if last else x[0].transpose(0, 1) for x in (key_states, value_states))

    q, k, v = torch.randn(3, 1, 2, 5, 8, device=DEVICE)
    starts, places = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 2, 5], [0, 1, 2, 3, 4]))
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, f"{longest}_q": 3, f"{longest}_k": 3}
    given |= {"read_index": [places], "write_index": [places], "logits_indices": places[:2], "use_cache": False}
    given |= {"logits_processor_args": places[:0].view(0, 1), "block_table": None, "position_ids": places[None]}
    module = torch.nn.Module()
    module.layer_idx = 0
    got, _ = adapter.attention(module, q, k, v, None, cache=Cache(), **given)
    sequences = [[x[:, :, a:b] for x in (q, k, v)] for a, b in ((0, 2), (2, 5))]
    want = [torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True) for x in sequences]
    close(got, torch.cat(want, 2).transpose(1, 2))
    with pytest.raises(adapter.Unsupported, match="block_table is given"):
        given["block_table"] = places[None]
        adapter.attention(module, q, k, v, None, cache=Cache(), **given)


def test_continuous_batching(models):
    """transformers accepts any attention name for continuous batching up to 5.17; from 5.23 on only its own names, and
    names with "flash" in them."""
    ours, theirs = models("llama")
    prompts = [tokens(n, seed=n).tolist() for n in (5, 9, 3)]
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    if not hasattr(ours, "generate_batch") or not V5:
        pytest.skip("the continuous batching of transformers 4 knows its own implementations only")
    try:
        batches = ours.generate_batch(prompts, generation_config=config)
    except ValueError as error:
        assert f"Implementation {NAME} is not supported for continuous batching" in str(error)
        pytest.skip(str(error))
    finally:
        ours.set_attn_implementation(NAME)
    assert [batch.error for batch in batches.values()] == [None] * 3  # errors of its thread
    expected = [theirs.generate(torch.tensor([x], device=DEVICE), generation_config=config)[0] for x in prompts]
    written = [batch.generated_tokens for batch in batches.values()]
    assert written == [x[len(p) :].tolist() for x, p in zip(expected, prompts, strict=True)]
