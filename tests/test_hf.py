#!/usr/bin/env python3
"""dev/hf/export.py and the model for Hugging Face: forward, generation, the tokenizer, the way back, lm-eval."""
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

from check import Skip, case, finish, skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
work = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=work.name)  # where the library keeps the code it has loaded
HERE = pathlib.Path(work.name)
try:
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as error:
    skip("Hugging Face", f"no {error.name} on this machine")
    finish()
sys.path.insert(0, str(ROOT / "dev/hf"))
from models import TRAINER, random_parameters, trainer, write_checkpoint, write_shard  # noqa: E402
from rdattnres import ARCHES, Config, RDAttnRes  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {"L": 3, "C": 48, "NH": 3, "F": 80, "S": 4, "T": 37, "V": 257}


def export(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "dev/hf/export.py"), *map(str, arguments)], capture_output=True,
                          text=True)


def exported(arch):
    """A random model of this arch: its checkpoint and its folder for Hugging Face."""
    checkpoint, folder = HERE / f"{arch}.safetensors", HERE / f"hf-{arch}"
    if not folder.exists():
        config = Config(arch, **SIZES)
        write_checkpoint(checkpoint, config, random_parameters(config, seed=5))
        done = export(checkpoint, folder)
        assert done.returncode == 0, done.stderr
    return checkpoint, folder


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def trained_losses(weights, shard, name, *flags):
    """The CPU trainer's loss of weights on a shard, and the checkpoint it writes of them."""
    if not TRAINER.exists():
        raise Skip(f"{TRAINER.name} is not built")
    trainer(HERE / name, None, "--init-from", weights, "--val", shard, "--steps", 0, *flags)
    events = map(json.loads, (HERE / name / "log.jsonl").read_text().splitlines())
    return [e["loss"] for e in events if e["event"] == "val"][-1], HERE / name / "ckpt_00000000.safetensors"


def random_shard(count, start=256):
    path = HERE / f"shard{count}.bin"
    write_shard(path, np.concatenate([[start], np.random.default_rng(0).integers(32, 127, count)]))
    return path


with case("the folder's model has the reference's logits and the trainer's loss, all arches"):
    tokens = torch.randint(257, (2, 37), generator=torch.Generator().manual_seed(1))
    shard = random_shard(2 * 37)
    data = torch.from_numpy(np.fromfile(shard, "<u2", offset=1024).astype(np.int64))
    for arch in ARCHES:
        checkpoint, folder = exported(arch)
        model = load(folder)
        with torch.no_grad():
            true = RDAttnRes.from_checkpoint(checkpoint, torch.float64)(tokens)
            error, plain = ((x - true).norm() / true.norm()
                            for x in (model(tokens).logits, RDAttnRes.from_checkpoint(checkpoint)(tokens)))
            windows = [data[i * 37:i * 37 + 38][None] for i in range(2)]
            got = sum(model(w, labels=w).loss.item() for w in windows) / 2
        want, _ = trained_losses(checkpoint, shard, "val-" + arch)
        print(f"    {arch:8} logits off by {error:.1e}, the reference's in float32 by {plain:.1e}")
        assert error <= 4 * plain
        print(f"    {arch:8} loss {got:.9g}, the trainer's {want:.9g}")
        assert abs(got - want) < 1e-6 * want

with case("generation with the cache gives the tokens of generation without, and a padded batch those of its rows"):
    model = load(exported("rd")[1])
    prompt = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 256,
                "output_logits": True, "return_dict_in_generate": True}
    with_cache, without = (model.generate(prompt, use_cache=c, **settings) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences) and with_cache.sequences.shape == (2, 29)
    apart = max((a - b).abs().max().item() for a, b in zip(with_cache.logits, without.logits))
    size = with_cache.logits[0].abs().max().item()
    print(f"    logits of up to {size:.1f} with and without the cache differ by {apart:.1e}")
    assert apart < 1e-5 * size
    padded = torch.cat([torch.full((2, 4), 256), prompt], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(2, -1)
    rows = model.generate(padded, attention_mask=mask, **settings).sequences[:, 4:]
    assert torch.equal(rows, with_cache.sequences)
    with torch.no_grad():  # in pieces: the second reads the keys and values of the first
        first = model(prompt[:, :5], use_cache=True)
        cache = first.to_tuple()[1]
        second = model(prompt[:, 5:], cache=cache).logits
        whole = model(prompt).logits
    assert (second - whole[:, 5:]).abs().max() < 1e-5 * size

with case("the way back: --init-from a folder saved by transformers gives every weight bit for bit"):
    shard = random_shard(37)
    for arch in ("rd", "block", "residual"):
        checkpoint, folder = exported(arch)
        model, want = load(folder), load_file(checkpoint)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            saved = HERE / f"saved-{arch}-{dtype}"
            want16 = {name: x.to(dtype).float() for name, x in want.items()}
            model.to(dtype).save_pretrained(saved)
            model.float().load_state_dict(want)
            _, back = trained_losses(saved / "model.safetensors", shard, f"back-{arch}-{dtype}")
            got = {n: x for n, x in load_file(back).items() if n.startswith("model.")}
            assert got.keys() == want16.keys() and all(torch.equal(got[n], want16[n]) for n in got), (arch, dtype)

with case("a model in several files, a folder with no checkpoint, a vocabulary with no tokenizer: one line"):
    checkpoint, folder = exported("rd")
    load(folder).save_pretrained(HERE / "many", max_shard_size="50KB")
    try:
        trained_losses(HERE / "many/model.safetensors", random_shard(37), "many-run")
    except AssertionError as error:
        assert "model.safetensors.index.json: a model in several files" in str(error), error
    else:
        assert False, "no error"
    config = Config("rd", **{**SIZES, "V": 300})
    write_checkpoint(HERE / "v300.safetensors", config, random_parameters(config, seed=1))
    for arguments, words in (((HERE / "many", HERE / "x"), "no checkpoint"), ((HERE / "none", HERE / "x"), "none"),
                             ((HERE / "v300.safetensors", HERE / "x"), "give its file with --tokenizer")):
        done = export(*arguments)
        assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1, done

with case("the tokenizer: single bytes, and merges found again from a tokenizer file"):
    text = "Ann's dog, 12 caf\u00e9s;  it\n\n\tran   home \u2603!"
    ids = transformers.AutoTokenizer.from_pretrained(exported("rd")[1], trust_remote_code=True)(text).input_ids
    assert ids == list(text.encode()), ids
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    original.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(vocab_size=299, special_tokens=[], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    original.train_from_iterator([text * 3, "the other mother and the brother ran there; it's hers, " * 9], learn)
    from export import letters_of_bytes
    byte_of = {letter: b for b, letter in letters_of_bytes().items()}
    names = [bytes(byte_of[c] for c in original.id_to_token(i)) for i in range(original.get_vocab_size())]
    header = np.zeros(256, "<u4")
    header[:4] = 20240328, 2, len(names) + 1, len(names)
    (HERE / "bpe.bin").write_bytes(header.tobytes() + b"".join(bytes([len(n)]) + n for n in [*names, b"<|endoftext|>"]))
    done = export(HERE / "v300.safetensors", HERE / "hf-bpe", "--tokenizer", HERE / "bpe.bin")
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "hf-bpe", trust_remote_code=True)
    for words in (text, "the mother's brother", "<|endoftext|>"):
        want = original.encode(words).ids if words[0] != "<" else [len(names)]
        assert tokenizer(words).input_ids == want and tokenizer.decode(want) == words, words

with case("lm-eval: the score of a small local task is the trainer's own loss"):
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise Skip(f"no {error.name} on this machine")
    checkpoint, folder = exported("rd")
    shard = random_shard(5 * 37)  # end-of-text, then a document of five windows
    text = np.fromfile(shard, "<u2", offset=1024)[1:].astype(np.uint8).tobytes().decode()
    (HERE / "task").mkdir()
    (HERE / "task/page.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (HERE / "task/page.yaml").write_text(json.dumps({
        "task": "page", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(HERE / "task/page.jsonl")}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}]}))
    results = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "trust_remote_code": True}, tasks=["page"], device="cpu",
        task_manager=TaskManager(include_path=str(HERE / "task"), include_defaults=False), bootstrap_iters=0)
    scores = results["results"]["page"]
    want, _ = trained_losses(checkpoint, shard, "lm-eval")
    print(f"    byte perplexity {scores['byte_perplexity,none']:.9g}, e^loss of the trainer {math.exp(want):.9g}")
    assert abs(math.log(scores["byte_perplexity,none"]) - want) < 1e-6 * want

finish()
