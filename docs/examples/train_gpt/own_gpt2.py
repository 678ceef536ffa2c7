"""A GPT-2 of transformers and its loss, for a configuration file of `pipeexec train`."""

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel


def model(
    layers: int = 4, width: int = 128, heads: int = 4, positions: int = 128, words: int = 50257
) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            n_positions=positions,
            vocab_size=words,
            bos_token_id=words - 1,
            eos_token_id=words - 1,
        )
    )


def loss(output, labels: Tensor) -> Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
