"""Families of models, each small and with random weights, with the batches that they take.

Most are of the package transformers, as in `transformers_models`; others are written here. Dropout
is that of the configuration's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import diffusion_and_vision_networks as networks
import torch
from torch import Tensor, nn

WORDS, LENGTH, IMAGE, CLASSES = 50, 8, 32, 5


class Family(NamedTuple):
    """A model, and its batches.

    Attributes
    ----------
    kind
        Group of the family.
    model
        Name of a class of transformers, or a function that makes the model.
    config, options
        Name of the configuration's class, and its arguments.
    inputs
        Arguments of the forward; see `batch`.
    remark
        Fact about the model, for the table.
    """

    kind: str
    model: str | Callable[[], nn.Module]
    config: str
    options: Mapping[str, Any]
    inputs: tuple[str, ...]
    remark: str = ""

    def make(self) -> nn.Module:
        """Return the model, in training mode, after the same seed."""
        torch.manual_seed(0)
        if not isinstance(self.model, str):
            return self.model().train()
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def batch(self, n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return arguments of n samples; floating-point ones of a type."""
        generator = torch.Generator().manual_seed(n)
        words = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
        mask = torch.ones(n, LENGTH, dtype=torch.long)
        mask[1::2, LENGTH - 3 :] = 0
        classes = torch.arange(n) % CLASSES
        makers: dict[str, Callable[[], Tensor]] = {
            "input_ids": lambda: words,
            "attention_mask": lambda: mask,
            "labels": lambda: words.flip(1),
            "decoder_input_ids": lambda: words[:, : LENGTH // 2].flip(1),
            "pixel_values": lambda: torch.randn(n, 3, IMAGE, IMAGE, generator=generator),
            "input_features": lambda: torch.randn(n, 8, 32, generator=generator),
            "input_values": lambda: torch.randn(n, 400, generator=generator),
            "spectrogram": lambda: torch.randn(n, 32, 16, generator=generator),
            "sample": lambda: torch.randn(n, 3, 16, 16, generator=generator),
            "timestep": lambda: torch.randint(1000, (n,), generator=generator),
            "class_labels": lambda: classes,
            "classes": lambda: classes,
            "map": lambda: torch.randint(CLASSES, (n, IMAGE, IMAGE), generator=generator),
        }
        names = {"classes": "labels", "map": "labels", "spectrogram": "input_values"}
        names |= {"pixel_values": "x"} if not isinstance(self.model, str) else {}
        values = {names.get(key, key): makers[key]() for key in self.inputs}
        return {key: x.to(dtype) if x.is_floating_point() else x for key, x in values.items()}


_TEXT = ("input_ids", "attention_mask", "labels")
_IDS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
          "num_hidden_layers": 4}  # fmt: skip
_LM: dict[str, Any] = {**_IDS, **_SIZES, "max_position_embeddings": 32}
_GROUPED = {**_LM, "num_key_value_heads": 2}
_IMAGE = {**_SIZES, "image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES}
_BART = {**_IDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "max_position_embeddings": 32, "decoder_start_token_id": 2,
         "forced_eos_token_id": 2}  # fmt: skip
_SPEECH = {**_IDS, **_SIZES, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8),
           "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
           "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "apply_spec_augment": False,
           "classifier_proj_size": 8, "num_labels": CLASSES}  # fmt: skip


def _decoder(config: str, options: Mapping[str, Any] = _GROUPED, kind: str = "decoder") -> Family:
    """Return a language model whose configuration has the name of its class."""
    return Family(kind, f"{config}ForCausalLM", f"{config}Config", options, _TEXT)


def _encoder(config: str, **options: Any) -> Family:
    """Return a model of masked words."""
    return Family("encoder", f"{config}ForMaskedLM", f"{config}Config", _LM | options, _TEXT)


def _image(config: str, options: Mapping[str, Any], labels: str = "classes") -> Family:
    """Return a classifier of images."""
    inputs = ("pixel_values", labels)
    return Family("vision", f"{config}ForImageClassification", f"{config}Config", options, inputs)


def _network(make: Callable[[], nn.Module], *inputs: str) -> Family:
    """Return a network that is written here."""
    return Family("network", make, "", {}, inputs or ("pixel_values",))


_MLA = {**_LM, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "GPT-2": Family(
        "decoder", "GPT2LMHeadModel", "GPT2Config",
        {**_IDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}, _TEXT,
    ),
    "Llama": _decoder("Llama"),
    "Mistral": _decoder("Mistral", {**_GROUPED, "sliding_window": 4}),
    "Qwen2": _decoder("Qwen2"),
    "Qwen3": _decoder("Qwen3", {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "Gemma 2": _decoder("Gemma2", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Gemma 3": Family(
        "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}, _TEXT,
    ),
    "Phi": _decoder("Phi", _LM),
    "Phi-3": _decoder("Phi3"),
    "OPT": _decoder("OPT", {**_LM, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "GPT-NeoX": _decoder("GPTNeoX", _LM),
    "Falcon": _decoder("Falcon", _LM),
    "MPT": _decoder("Mpt", {**_IDS, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 32}),
    "Bloom": _decoder("Bloom", {**_IDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "StableLM": _decoder("StableLm"),
    "Cohere": _decoder("Cohere"),
    "OLMo 2": _decoder("Olmo2"),
    "Mixtral": _decoder("Mixtral", {**_GROUPED, "num_local_experts": 4}, "experts"),
    "Mixtral, router loss": _decoder(
        "Mixtral", {**_GROUPED, "num_local_experts": 4, "output_router_logits": True}, "experts"
    ),
    "Qwen2-MoE": _decoder(
        "Qwen2Moe", _GROUPED | _EXPERTS | {
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}, "experts",
    ),
    "DeepSeek-V2": _decoder("DeepseekV2", _MLA, "experts"),
    "DeepSeek-V3": _decoder("DeepseekV3", _MLA, "experts"),
    "OLMoE": _decoder("Olmoe", _GROUPED | _EXPERTS, "experts"),
    "JetMoE": _decoder(
        "JetMoe", {**_IDS, "hidden_size": 32, "num_hidden_layers": 4, "num_key_value_heads": 2,
                   "kv_channels": 8, "intermediate_size": 32, "num_local_experts": 4,
                   "num_experts_per_tok": 2, "max_position_embeddings": 32}, "experts",
    ),
    "BERT": _encoder("Bert"),
    "RoBERTa": _encoder("Roberta", pad_token_id=1),
    "ALBERT": _encoder("Albert", embedding_size=16),
    "DeBERTa": _encoder("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa-V2": _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8
    ),
    "ELECTRA": _encoder("Electra", embedding_size=16),
    "DistilBERT": _encoder("DistilBert", dim=32, hidden_dim=64, n_layers=4, n_heads=4),
    "ModernBERT": _encoder("ModernBert", local_attention=4, reference_compile=False),
    "T5": Family(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
         "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, _TEXT,
    ),
    "BART": Family(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig", _BART, _TEXT
    ),
    "Pegasus": Family(
        "encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig", _BART, _TEXT
    ),
    "Marian": Family("encoder-decoder", "MarianMTModel", "MarianConfig", _BART, _TEXT),
    "ViT": _image("ViT", _IMAGE),
    "DeiT": _image("DeiT", _IMAGE),
    "Swin": _image(
        "Swin", {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2],
                 "num_heads": [2, 2], "window_size": 4, "num_labels": CLASSES},
    ),
    "BEiT": _image("Beit", {**_IMAGE, "use_relative_position_bias": True}),
    "ConvNeXt": _image(
        "ConvNext", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2,
                     "patch_size": 4, "drop_path_rate": 0.1, "num_labels": CLASSES},
    ),
    "ResNet": _image(
        "ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2],
                   "layer_type": "basic", "num_labels": CLASSES},
    ),
    "SegFormer": Family(
        "vision", "SegformerForSemanticSegmentation", "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
         "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES},
        ("pixel_values", "map"),
    ),
    "CLIP vision": Family(
        "vision", "CLIPVisionModel", "CLIPVisionConfig", _IMAGE, ("pixel_values",)
    ),
    "Whisper": Family(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        ("input_features", "labels"),
    ),
    "Wav2Vec2": Family(
        "audio", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SPEECH,
        ("input_values", "classes"), "no SpecAugment, which draws from numpy",
    ),
    "HuBERT": Family(
        "audio", "HubertForSequenceClassification", "HubertConfig", _SPEECH,
        ("input_values", "classes"), "no SpecAugment, which draws from numpy",
    ),
    "AST": Family(
        "audio", "ASTForAudioClassification", "ASTConfig",
        {**_SIZES, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32,
         "num_mel_bins": 16, "num_labels": CLASSES}, ("spectrogram", "classes"),
    ),
    "Mamba": _decoder(
        "Mamba", {**_IDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4},
        "state space",
    ),
    "Mamba-2": _decoder(
        "Mamba2", {**_IDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4,
                   "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, "state space",
    ),
    "RWKV": Family(
        "state space", "RwkvForCausalLM", "RwkvConfig",
        {**_IDS, "hidden_size": 16, "num_hidden_layers": 4, "context_length": 32,
         "rescale_every": 0, "use_cache": False},
        ("input_ids", "labels"), "rescale_every=0: its forward changes no weights",
    ),
    "RecurrentGemma": _decoder(
        "RecurrentGemma", {**_GROUPED, "lru_width": 32, "head_dim": 8,
                           "attention_window_size": 8}, "state space",
    ),
    "U-Net": _network(networks.UNet, "sample", "timestep"),
    "DiT": _network(networks.DiffusionTransformer, "sample", "timestep", "class_labels"),
    "ResNet (torchvision)": _network(networks.ResNet),
    "DenseNet": _network(networks.DenseNet),
    "MobileNetV2": _network(networks.MobileNetV2),
    "EfficientNet": _network(networks.EfficientNet),
    "VGG": _network(networks.VGG),
    "Inception": _network(networks.Inception),
}  # fmt: skip
