"""Small networks as those of the packages diffusers and torchvision, which need not be installed.

Each class has the forward of a well-known network: skips, branches and outputs of its kind.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CLASSES = 5


def time_embedding(times: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times, in 32 bits: samples x width."""
    rates = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _ResidualBlock(nn.Module):
    """Two convolutions with group norms, a time embedding between them, and a residual."""

    def __init__(self, n_in: int, n_out: int, n_time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, n_in), nn.GroupNorm(4, n_out)
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.time = nn.Linear(n_time, n_out)
        self.shortcut = nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the output."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class _Attention(nn.Module):
    """Attention of all positions of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, width), 2
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        n, width, height, _ = x.shape
        y = self.qkv(self.norm(x).flatten(2).transpose(1, 2))
        q, k, v = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).reshape(n, width, height, -1)


class UNet(nn.Module):
    """A U-Net for diffusion: skips from each block on the way down to its partner on the way up."""

    def __init__(self, channels: int = 8, n_time: int = 16) -> None:
        super().__init__()
        widths = [channels, channels, 2 * channels, 2 * channels]
        self.n_time = n_time
        self.time = nn.Sequential(nn.Linear(n_time, n_time), nn.SiLU(), nn.Linear(n_time, n_time))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            _ResidualBlock(a, b, n_time) for a, b in zip([channels, *widths], widths, strict=False)
        )
        self.middle = nn.ModuleList([_ResidualBlock(widths[-1], widths[-1], n_time)])
        self.attention = _Attention(widths[-1])
        ups = [*reversed(widths)]
        self.up = nn.ModuleList(
            _ResidualBlock(a + b, c, n_time)
            for a, b, c in zip(ups, ups, [*ups[1:], channels], strict=True)
        )
        self.norm, self.last = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        """Return the noise of each pixel."""
        time = self.time(time_embedding(timestep, self.n_time).to(sample.dtype))
        x, skips = self.first(sample), []
        for k, block in enumerate(self.down):
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2) if k % 2 else x
        x = self.attention(self.middle[0](x, time))
        for block in self.up:
            skip = skips.pop()
            if skip.shape[-1] != x.shape[-1]:
                x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), time)
        return {"sample": self.last(F.silu(self.norm(x)))}


class _AdaptiveBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition (adaLN-Zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the output."""
        a, b, c, d, e, f = self.condition(F.silu(condition))[:, None].chunk(6, dim=-1)
        y = self.norm1(x) * (1 + a) + b
        x = x + c * self.attention(y, y, y, need_weights=False)[0]
        return x + f * self.down(F.gelu(self.up(self.norm2(x) * (1 + d) + e)))


class DiffusionTransformer(nn.Module):
    """A DiT: patches, fixed positions, and a condition of time and class for each block."""

    positions: Tensor

    def __init__(self, width: int = 16, n_blocks: int = 4, size: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.time, self.label = nn.Linear(width, width), nn.Embedding(_CLASSES, width)
        self.register_buffer(
            "positions", time_embedding(torch.arange((size // patch) ** 2), width), persistent=False
        )
        self.blocks = nn.ModuleList(_AdaptiveBlock(width) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.shift, self.head = nn.Linear(width, 2 * width), nn.Linear(width, 3 * patch * patch)

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        """Return the noise of each pixel."""
        x = self.embed(sample)
        rows = x.shape[-1]
        x = x.flatten(2).transpose(1, 2) + self.positions
        time = time_embedding(timestep, self.width).to(sample.dtype)
        condition = self.time(time) + self.label(class_labels)
        for block in self.blocks:
            x = block(x, condition)
        scale, shift = self.shift(F.silu(condition))[:, None].chunk(2, dim=-1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.reshape(len(x), rows, rows, self.patch, self.patch, 3)
        return torch.einsum("nhwpqc->nchpwq", x).flatten(4).flatten(2, 3)


def _conv(n_in: int, n_out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution, a batch norm and a ReLU."""
    conv = nn.Conv2d(n_in, n_out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


class _BasicBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(n_in, n_out, stride=stride), _conv(n_out, n_out)[:2]
        self.downsample = _conv(n_in, n_out, 1, stride)[:2] if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.conv2(self.conv1(x))
        out += identity
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """A ResNet with layers of basic blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = _conv(3, 8), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(_BasicBlock(8, 8, 1), _BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(_BasicBlock(8, 16, 2), _BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(_BasicBlock(16, 16, 2), _BasicBlock(16, 16, 1))
        self.fc = nn.Linear(16, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.layer3(self.layer2(self.layer1(self.pool(self.stem(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class _DenseLayer(nn.Module):
    """Takes the list of all earlier features."""

    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(n_in), nn.Conv2d(n_in, growth, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class _DenseBlock(nn.ModuleDict):
    def __init__(self, n_layers: int, n_in: int, growth: int) -> None:
        super().__init__()
        for k in range(n_layers):
            self.add_module(f"denselayer{k + 1}", _DenseLayer(n_in + k * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A DenseNet: each layer takes the features of all before."""

    def __init__(self, growth: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(3, 8), _DenseBlock(3, 8, growth), _conv(8 + 3 * growth, 8, 1), nn.AvgPool2d(2),
            _DenseBlock(3, 8, growth), nn.BatchNorm2d(8 + 3 * growth),
        )  # fmt: skip
        self.classifier = nn.Linear(8 + 3 * growth, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class _StochasticDepth(nn.Module):
    """Drops the branch of some samples in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)


class _InvertedResidual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, rate: float, squeeze: int) -> None:
        super().__init__()
        hidden = 2 * n_in
        self.expand = _conv(n_in, hidden, 1)
        self.depthwise = _conv(hidden, hidden, stride=stride, groups=hidden)
        self.squeeze = nn.Conv2d(hidden, squeeze, 1) if squeeze else None
        self.excite = nn.Conv2d(squeeze, hidden, 1) if squeeze else None
        self.project = _conv(hidden, n_out, 1)[:2]
        self.use_residual = stride == 1 and n_in == n_out
        self.stochastic_depth = _StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        if self.squeeze is not None and self.excite is not None:
            scale = F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
            y = y * torch.sigmoid(self.excite(scale))
        y = self.project(y)
        return x + self.stochastic_depth(y) if self.use_residual else y


class MobileNetV2(nn.Module):
    """A MobileNetV2: inverted residuals in one `nn.Sequential`."""

    def __init__(self, rate: float = 0.0, squeeze: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        rows = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
        blocks = [
            _InvertedResidual(*row, rate=rate * k / len(rows), squeeze=squeeze)
            for k, row in enumerate(rows)
        ]
        self.features = nn.Sequential(_conv(3, 8, stride=2), *blocks, _conv(16, 24, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(24, _CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class EfficientNet(MobileNetV2):
    """An EfficientNet: as MobileNetV2, with squeeze-and-excitation and stochastic depth."""

    def __init__(self) -> None:
        super().__init__(rate=0.4, squeeze=4, dropout=0.2)


class VGG(nn.Module):
    """A VGG: a chain of convolutions in one `nn.Sequential`, and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in ((3, 8), (8, 8), (8, 16), (16, 16)):
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)] if n_in == n_out else []
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(64, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, _CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class AuxiliaryOutputs(NamedTuple):
    """Logits, and those of the auxiliary head in training."""

    logits: Tensor
    aux_logits: Tensor | None


class _Mixed(nn.Module):
    """Parallel branches whose results are concatenated."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.branch1 = _conv(n_in, 4, 1)
        self.branch3 = nn.Sequential(_conv(n_in, 4, 1), _conv(4, 8))
        self.branch_pool = _conv(n_in, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.branch_pool(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.branch1(x), self.branch3(x), pooled], 1)


class Inception(nn.Module):
    """An Inception: branches, and an auxiliary head in the middle that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 8, stride=2)
        self.mixed_5b, self.mixed_5c, self.mixed_6a = _Mixed(8), _Mixed(16), _Mixed(16)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _CLASSES))
        self.mixed_7a, self.fc = _Mixed(16), nn.Linear(16, _CLASSES)

    def forward(self, x: Tensor) -> AuxiliaryOutputs:
        """Return logits."""
        x = (x * 0.229 + 0.485) / 0.5
        x = self.mixed_6a(self.mixed_5c(self.mixed_5b(self.stem(x))))
        aux = self.aux(x) if self.training else None
        x = F.adaptive_avg_pool2d(self.mixed_7a(x), (1, 1))
        return AuxiliaryOutputs(self.fc(torch.flatten(x, 1)), aux)
