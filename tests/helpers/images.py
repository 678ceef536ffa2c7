"""Real images, small enough for a test: both sets come inside scikit-learn, so nothing is fetched.

Handwritten digits: E. Alpaydin, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998. Photographs: of China by danielbuechele, of a flower by vultilion, both on
Flickr, CC BY 2.0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def digits(n: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``n`` of the 1,797 digits: (n, 1, 16, 16) from 0 to 1, and what they are, 0 to 9.

    Every pixel of the 8x8 originals is four.
    """
    from sklearn.datasets import load_digits  # takes seconds, which other tests do without

    digits = load_digits()
    images = torch.from_numpy(digits.images[first : first + n]).float() / 16
    wide = images.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    return wide[:, None], torch.from_numpy(digits.target[first : first + n])


def noisy_patches(n: int, size: int = 32, *, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return ``n`` squares of the two photographs with noise, and without: (n, 3, size, size).

    Half of them from either; colours from 0 to 1, places and noise always the same.
    """
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    rng = np.random.default_rng(0)
    squares = []
    for i in range(n):
        photograph = photographs[i % len(photographs)]
        row, column = (rng.integers(length - size) for length in photograph.shape[:2])
        squares.append(photograph[row : row + size, column : column + size])
    clean = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float() / 255
    added = noise * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean + added, clean
