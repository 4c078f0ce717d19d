"""A GLM-4-MoE of a million random parameters, made on the spot: `python -m tests.real.tiny_glm FOLDER`.

The architecture and tensor names are those of the real model, so an engine takes the same path through its code: grouped
experts, shared experts, a dense first layer. Its tokenizer has one token for each byte, so a prompt of 700 letters is 700
tokens, and its output layer knows only printable ASCII, so that answers can be read and compared.
"""

import argparse
import json
import shutil
import string
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPOILT_TENSOR = "model.layers.1.mlp.experts.5.down_proj.weight"
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 24
SPECIAL_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write_tiny_glm(folder: Path, seed: int) -> None:
    """Writes config, weights (float32, real checkpoint names), tokenizer and chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL_TOKENS[0], additional_special_tokens=SPECIAL_TOKENS[1:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        eos_token_id=vocabulary[SPECIAL_TOKENS[0]],
        initializer_range=0.2,  # large, so that logits are far apart and rounding moves no token
        dtype="float32",
    )
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        printable = {vocabulary[letter] for letter in string.ascii_letters + string.digits}
        for token in range(len(vocabulary)):
            if token not in printable:
                model.lm_head.weight[token] = 0
    model.save_pretrained(folder, max_shard_size="2MB")


def greedy_answer(folder: Path, tokens: int) -> str:
    """What transformers, which knows nothing of vLLM, says to QUESTION with these weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
    answer: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    return answer


def write_variants(folder: Path) -> None:
    """FOLDER/first and /second differ in their weights only; /lacking and /misshapen are second with one tensor spoilt.

    FOLDER/answers.json holds what the first two answer to QUESTION.
    """
    from safetensors.torch import load_file, save_file

    for seed, name in enumerate(("first", "second"), start=1):
        write_tiny_glm(folder / name, seed)
    answers = {name: greedy_answer(folder / name, ANSWER_TOKENS) for name in ("first", "second")}
    (folder / "answers.json").write_text(json.dumps(answers))
    for name in ("lacking", "misshapen"):
        spoilt = folder / name
        shutil.copytree(folder / "second", spoilt)
        shard = next(path for path in sorted(spoilt.glob("*.safetensors")) if SPOILT_TENSOR in load_file(path))
        tensors = load_file(shard)
        tensor = tensors.pop(SPOILT_TENSOR)
        if name == "misshapen":
            tensors[SPOILT_TENSOR] = tensor.T.contiguous()
        save_file(tensors, shard, metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_variants(parser.parse_args().folder)
