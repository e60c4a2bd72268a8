#!/usr/bin/env python3
"""export.py - a trained model as a Hugging Face folder: weights, sizes, tokenizer and the model's code.

    python3 dev/hf/export.py RUN_OR_CHECKPOINT FOLDER [--tokenizer FILE]

If a run's folder is given, its newest checkpoint is exported. The tokenizer is the run's own:
bytes for 257 tokens, else the file it was trained with, or --tokenizer. Afterwards
    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
works, and so does the way back: --init-from FOLDER/model.safetensors. Needs numpy and safetensors.
"""
import argparse
import json
import pathlib
import shutil
import struct
import sys

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
SIZES = ("layers", "width", "heads", "ffn", "block-size", "context", "vocab")


def newest_checkpoint(path):
    if not path.is_dir():
        return path
    found = sorted(path.glob("ckpt_*.safetensors"))
    if not found:
        sys.exit(f"export.py: {path}: no checkpoint ckpt_*.safetensors in this folder")
    return found[-1]


def read_tokens(path):
    """The bytes of every token of a tokenizer file, and the number of its end-of-text."""
    data = pathlib.Path(path).read_bytes()
    magic, version, size, eot = struct.unpack("<4I", data[:16].ljust(16, b"\0"))
    if (magic, version) != (20240328, 2):
        sys.exit(f"export.py: {path}: magic {magic}, version {version}, expected 20240328, 2 of a tokenizer")
    tokens, at = [], 1024
    for _ in range(size):
        end = at + 1 + data[at] if at < len(data) else len(data) + 1
        if end > len(data):
            sys.exit(f"export.py: {path}: cut short: ends inside token {len(tokens)} of {size}")
        tokens.append(data[at + 1:end])
        at = end
    return tokens, eot


def merge_of(token, number):
    """The two tokens that byte-pair encoding joins last on the way to this one; number: {bytes: its number}."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [number.get(a + b, number[token]) for a, b in zip(parts, parts[1:])]
        i = min(range(len(joined)), key=joined.__getitem__)
        if joined[i] >= number[token]:
            return None  # text never becomes this token
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def letters_of_bytes():
    """{byte: letter}: the format wants text, so what is not printable stands as U+0100 and up, as GPT-2 has it."""
    letters = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [b for b in range(256) if b not in letters]
    return {**letters, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def tokenizer_json(tokens, eot, words):
    """Byte-pair encoding in the tokenizers library's format. words: cut text into GPT-2's words first."""
    letters = letters_of_bytes()

    def text(token):
        return "".join(letters[b] for b in token)

    number = {token: i for i, token in reversed([*enumerate(tokens)]) if i != eot and token}
    merges = [merge_of(token, number) for token in sorted(number, key=number.get) if len(token) > 1]
    end = {"id": eot, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    vocab = {"<|endoftext|>": eot, **{text(token): i for token, i in number.items()}}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
             "merges": [" ".join(map(text, merge)) for merge in merges if merge]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--tokenizer", help="tokenizer file, if the run's is not where it was")
    args = parser.parse_args()
    path = newest_checkpoint(args.checkpoint)
    with safe_open(path, "np") as file:
        said = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith("model.")}
    if "arch" not in said:
        sys.exit(f"export.py: {path}: no metadata arch, expected a checkpoint of the trainers")

    vocab, source = int(said["vocab"]), args.tokenizer or said.get("tokenizer")
    if not source and vocab != 257:
        sys.exit(f"export.py: {path}: a vocabulary of {vocab} and no tokenizer; give its file with --tokenizer")
    tokens, eot = read_tokens(source) if source else ([bytes([b]) for b in range(256)] + [b""], 256)
    if len(tokens) > vocab:
        sys.exit(f"export.py: {source}: {len(tokens)} tokens, expected at most the model's {vocab}")

    code = "modeling_rdattnres."
    config = {"model_type": "rdattnres", "architectures": ["RDAttnResForCausalLM"], "arch": said["arch"],
              "auto_map": {"AutoConfig": code + "RDAttnResConfig", "AutoModelForCausalLM": code + "RDAttnResForCausalLM"},
              **{name.replace("-", "_"): int(said[name]) for name in SIZES}, "dtype": "float32",
              "bos_token_id": eot, "eos_token_id": eot}
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = {"config.json": config, "tokenizer.json": tokenizer_json(tokens, eot, bool(source)),
             "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                                       "eos_token": "<|endoftext|>", "model_max_length": int(said["context"]),
                                       "clean_up_tokenization_spaces": False,
                                       "model_input_names": ["input_ids", "attention_mask"]}}
    for name, content in texts.items():
        (args.folder / name).write_text(json.dumps(content, indent=1) + "\n")
    for name in ("modeling_rdattnres.py", "rdattnres.py"):
        shutil.copy(HERE / name, args.folder)
    save_file(weights, args.folder / "model.safetensors", {"format": "pt"})
    print(f"{path} as a Hugging Face folder: {args.folder}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, SafetensorError) as error:
        sys.exit(f"export.py: {error}")
