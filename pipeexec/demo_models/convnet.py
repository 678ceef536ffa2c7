"""Residual network with batch norm: an ``nn.Sequential`` that can be cut between any two layers."""

from __future__ import annotations

from torch import Tensor, nn

from pipeexec.demo_models.construction import (
    check_parameters,
    check_sizes,
    costed_layer,
    seeded_model,
)


def convnet(
    *,
    n_blocks: int = 8,
    channels: int = 32,
    image_size: int = 32,
    n_classes: int = 10,
    seed: int = 0,
) -> nn.Sequential:
    """Build a residual network: a stem, ``n_blocks`` blocks of one width, pooling with classifier.

    The model has ``n_blocks + 2`` layers. It demands more of a pipeline than the language model:

    - its ReLUs work in place;
    - its batch norms keep running statistics, which are those of a micro-batch;
    - in training mode its outputs depend on the micro-batch size.

    Returns
    -------
    nn.Sequential
        From (batch, 3, image_size, image_size) to logits (batch, n_classes).
    """
    check_sizes(n_blocks=n_blocks, channels=channels, image_size=image_size, n_classes=n_classes)
    check_parameters(
        n_blocks * (18 * channels**2 + 4 * channels) + (27 + n_classes) * channels,
        n_blocks=n_blocks, channels=channels, n_classes=n_classes,
    )  # fmt: skip
    return seeded_model(
        lambda: [
            costed_layer(0.15, *_conv_norm(3, channels), nn.ReLU(inplace=True)),
            *(_ResidualBlock(channels) for _ in range(n_blocks)),
            costed_layer(
                0.03, nn.AvgPool2d(image_size), nn.Flatten(), nn.Linear(channels, n_classes)
            ),
        ],
        seed,
    )


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, channels, height, width) to the same."""

    relative_cost = 1.0

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels, channels), nn.ReLU(inplace=True), *_conv_norm(channels, channels)
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.body(x) + x)
        return y


def _conv_norm(n_in: int, n_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)
