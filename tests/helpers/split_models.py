"""Small models of the shapes that people split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 16, 11


class Block(nn.Module):
    """A transformer's block: attention under a mask, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """Embeddings, blocks and a head; a mask of words, and positions that may be given."""

    def __init__(self, n_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block() for _ in range(n_blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(
        self, words: Tensor, mask: Tensor | None = None, places: Tensor | None = None
    ) -> dict[str, Tensor]:
        if places is None:
            places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.words(words) + self.places(places))
        allowed = None if mask is None else mask[:, None, :].bool()
        for block in self.blocks:
            x = block(x, mask=allowed)
        return {"logits": self.head(self.norm(x))}


class Translation(nn.Module):
    """Two chains; blocks of the second one take the result of the first, too."""

    class Decoder(nn.Module):
        """A block with an input beside that of the block before."""

        def __init__(self) -> None:
            super().__init__()
            self.block, self.cross = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, None]:
            return self.block(x + self.cross(other).mean(1, keepdim=True)), None

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.dropout = nn.Dropout(0.0)
        self.decoder = nn.ModuleList([self.Decoder() for _ in range(3)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.words(source)
        for block in self.encoder:
            x = block(x)
        x, y = self.dropout(x), self.dropout(self.words(target))
        for decoder in self.decoder:
            y, _ = decoder(y, x)
        return y * self.scale


class VisionLanguage(nn.Module):
    """Blocks of a vision tower, whose output takes the place of words in those of a language model.

    As models of transformers do, it asks the tower for parameters, and keeps a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.vision = nn.Embedding(WORDS, WIDTH), nn.Module()
        self.vision.patches = nn.Linear(6, WIDTH)
        self.vision.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.n_words: Tensor | None = None

    def forward(self, words: Tensor, image: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(words)
        y = self.vision.patches(image.to(next(self.vision.parameters()).dtype))
        for block in self.vision.blocks:
            y = block(y)
        if not all(p.requires_grad for p in self.vision.parameters()):
            y = y.detach()
        self.n_words = (words != 0).sum(1)
        x = x.masked_scatter((words == 0)[..., None], y)
        for block in self.blocks:
            x = block(x, mask=None if mask is None else mask[:, None, :])
        return self.head(x)

    @staticmethod
    def batch(n: int) -> dict[str, Tensor]:
        """Return n samples: words, of which two are those of the image, its patches and a mask."""
        generator = torch.Generator().manual_seed(n)
        words = torch.randint(1, WORDS, (n, 5), generator=generator)
        words[:, 1:3] = 0
        mask = torch.ones(n, 5, dtype=torch.bool)
        mask[::2, 4] = False
        image = torch.randn(n, 2, 6, generator=generator).double()
        return {"words": words, "image": image, "mask": mask}


class Residual(nn.Module):
    """Groups of convolutions with residuals, as in a ResNet, and a head."""

    class Layer(nn.Module):
        """A residual around two convolutions."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.inner(x))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.groups = nn.Sequential(*(nn.Sequential(self.Layer(), self.Layer()) for _ in range(2)))
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.groups(self.first(image)).mean((2, 3)))


class Deciding(nn.Module):
    """A forward that reads numbers of an argument and of a block's result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y = first
        for block in self.blocks[1:]:
            y = block(y)
            if flag.sum() > 0:
                y = y * 2
            if float(first.detach().sum()) > 0:
                y = y + 1
        return y


class Writing(nn.Module):
    """A forward that writes a block's result into a view of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[:, :4] = self.blocks[0](x)[:, :4]
        y = self.blocks[2](self.blocks[1](x))
        return self.last(y + kept)


class Tied(nn.Module):
    """An embedding that is the head, too: as a parameter of another module, or read by a function.

    Another parameter belongs to a module inside the second and inside the third block.
    """

    def __init__(self, has_head: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[2].mlp[0].weight = self.blocks[1].mlp[0].weight
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if has_head else None
        if self.head is not None:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.words.weight) if self.head is None else self.head(x)


class Repeating(nn.Module):
    """One block that is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for _ in range(4):
            x = self.block(x)
        return x
