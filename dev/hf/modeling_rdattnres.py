"""RD-AttnRes for Hugging Face: a folder that export.py wrote loads with

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The model itself is in rdattnres.py; this file holds only what the library needs around it.
"""
import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .rdattnres import Config, RDAttnRes

# The library renamed past_key_values to cache; both names are served.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class RDAttnResConfig(PretrainedConfig):
    """The sizes under the names of the trainers' flags; Hugging Face's names for them work too."""
    model_type = "rdattnres"
    attribute_map = {"num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads",
                     "intermediate_size": "ffn", "max_position_embeddings": "context", "vocab_size": "vocab"}

    def __init__(self, arch="rd", layers=4, width=64, heads=4, ffn=192, block_size=2, context=160, vocab=257,
                 **kwargs):
        self.arch, self.layers, self.width, self.heads = arch, layers, width, heads
        self.ffn, self.block_size, self.context, self.vocab = ffn, block_size, context, vocab
        super().__init__(**kwargs)


class RDAttnResForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RDAttnResConfig
    base_model_prefix = "model"  # so parameters have the names that they have in a checkpoint: model.wte, ...

    def __init__(self, config):
        super().__init__(config)
        c = config
        self.model = RDAttnRes(Config(c.arch, c.layers, c.width, c.heads, c.ffn, c.block_size, c.context, c.vocab))
        self.post_init()

    def get_input_embeddings(self):
        return None  # wte is one parameter with padding rows, not an nn.Embedding to be resized

    def _init_weights(self, module):
        """As the trainers start: matrices N(0, 0.02), what joins the partial narrower, queries 0, the rest 1."""
        if not isinstance(module, RDAttnRes):
            return
        for name, p in module.named_parameters():
            if name.endswith(("norm", "gain")):
                torch.nn.init.ones_(p)
            elif "route" in name:
                torch.nn.init.zeros_(p)
            else:
                joins = name in ("wo", "w_down")
                torch.nn.init.normal_(p, std=0.02 / (2 * self.config.layers) ** 0.5 if joins else 0.02)
        with torch.no_grad():
            module.wte[self.config.vocab:] = 0

    def forward(self, input_ids, attention_mask=None, cache=None, past_key_values=None, use_cache=None, labels=None,
                **_):
        """input_ids, labels (B,T); attention_mask (B, all tokens so far), 0 where a batch is padded."""
        B, T = input_ids.shape
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        seen = 0 if cache is None else cache.get_seq_length()
        mask = None
        if seen > 0 or attention_mask is not None:
            mask = torch.ones(T, seen + T, dtype=torch.bool, device=input_ids.device).tril(seen)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        logits = self.model(input_ids, cache, mask)
        loss = None
        if labels is not None:  # Hugging Face's labels are the tokens themselves, -100 where none counts
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
