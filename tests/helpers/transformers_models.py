"""Small models of the package transformers, with random weights: nothing is loaded.

The package is imported by the first call, as that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WORDS, LENGTH = 50, 6
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Case(NamedTuple):
    """A model, and the kinds of its arguments.

    Attributes
    ----------
    config, model
        Names of classes of transformers.
    options
        Arguments of the configuration.
    inputs
        Arguments of the forward; see `batch`.
    is_tied
        Whether stages have copies of a parameter: an embedding that is the head, or shared layers.
    """

    config: str
    model: str
    options: Mapping[str, Any]
    inputs: tuple[str, ...]
    is_tied: bool

    def make(self) -> nn.Module:
        """Return the model, in eval mode, after the same seed."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.eval()


def batch(case: Case, n: int) -> dict[str, Tensor]:
    """Return arguments of n samples."""
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
    if "image_token_index" in case.options:  # the last word, four times
        words.clamp_(max=WORDS - 2)[:, 1:5] = WORDS - 1
    mask = torch.ones(n, LENGTH, dtype=torch.long)
    mask[1::2, LENGTH // 2 :] = 0
    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: words,
        "attention_mask": lambda: mask,
        "decoder_input_ids": lambda: words[:, : LENGTH // 2].flip(1),
        "pixel_values": lambda: torch.randn(n, 3, 32, 32, generator=generator),
    }
    return {name: makers[name]() for name in case.inputs}


_TEXT = ("input_ids", "attention_mask")
MODELS = {
    "gpt2": Case(
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | _ENDS,
        _TEXT, is_tied=True,
    ),
    "llama": Case(
        "LlamaConfig", "LlamaForCausalLM",
        {"vocab_size": WORDS, "num_hidden_layers": 4, "num_key_value_heads": 2} | _SIZES,
        _TEXT, is_tied=False,
    ),
    "qwen3": Case(
        "Qwen3Config", "Qwen3ForCausalLM",
        {"vocab_size": WORDS, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8,
         "tie_word_embeddings": True} | _SIZES,
        ("input_ids",), is_tied=True,
    ),
    "t5": Case(
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
         "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        (*_TEXT, "decoder_input_ids"), is_tied=True,
    ),
    "bert": Case(
        "BertConfig", "BertForMaskedLM",
        {"vocab_size": WORDS, "num_hidden_layers": 4, "max_position_embeddings": 16}
        | _SIZES | _NO_DROPOUT,
        _TEXT, is_tied=True,
    ),
    "albert": Case(
        "AlbertConfig", "AlbertForMaskedLM",
        {"vocab_size": WORDS, "num_hidden_layers": 4, "embedding_size": 16,
         "max_position_embeddings": 16} | _SIZES | _NO_DROPOUT,
        _TEXT, is_tied=True,
    ),
    "vit": Case(
        "ViTConfig", "ViTForImageClassification",
        {"num_hidden_layers": 4, "image_size": 32, "patch_size": 16} | _SIZES | _NO_DROPOUT,
        ("pixel_values",), is_tied=False,
    ),
    "resnet": Case(
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
        ("pixel_values",), is_tied=False,
    ),
    "llava": Case(
        "LlavaConfig", "LlavaForConditionalGeneration",
        {"vision_config": _SIZES | {"model_type": "clip_vision_model", "num_hidden_layers": 2,
                                    "image_size": 32, "patch_size": 16},
         "text_config": _SIZES | {"model_type": "llama", "vocab_size": WORDS,
                                  "num_hidden_layers": 2, "num_key_value_heads": 2},
         "image_token_index": WORDS - 1},
        (*_TEXT, "pixel_values"), is_tied=False,
    ),
}  # fmt: skip
