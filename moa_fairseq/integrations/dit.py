"""DiT (arXiv 2212.09748), dense and with MoH's heads by depth (arXiv 2410.11842, Table 2), in torch alone."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.dense import DenseAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing

# size → layers, width and heads of the dense model
SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
# (size, per cent of active heads) → (layers, (heads, shared, selected)) by depth, as in MoH's code
MIXTURES: dict[tuple[str, int], tuple[tuple[int, tuple[int, int, int]], ...]] = {
    ("S", 90): ((8, (6, 3, 2)), (4, (6, 6, 0))),
    ("S", 75): ((2, (6, 2, 1)), (4, (6, 3, 1)), (4, (6, 3, 2)), (2, (6, 6, 0))),
    ("B", 90): ((5, (12, 6, 4)), (5, (12, 7, 4)), (2, (12, 12, 0))),
    ("B", 75): ((2, (12, 4, 2)), (8, (12, 6, 3)), (2, (12, 12, 0))),
    ("L", 90): ((8, (8, 8, 0)), (8, (16, 16, 0)), (8, (24, 16, 3))),
    ("L", 75): ((8, (8, 8, 0)), (8, (16, 8, 4)), (8, (24, 12, 4))),
    ("XL", 90): ((9, (8, 8, 0)), (10, (16, 16, 0)), (9, (24, 16, 3))),
    ("XL", 75): ((9, (8, 8, 0)), (10, (16, 10, 2)), (9, (24, 14, 2))),
}
PATCH = 2  # pixels of a side of a patch
CLASS_DROPOUT = 0.1  # the share of images without a class in training
FREQUENCIES = 256  # the width of the encoding of a noise level


def waves(places: Tensor, width: int) -> Tensor:
    """Cosines, then sines, of each place at width / 2 frequencies from 1 down to 1/10,000.

    Args:
        places: numbers of columns or rows of patches, or noise levels, [N].
        width: the width of the result, an even number.

    Returns:
        The encodings, [N, width] float32.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=places.device)
    angles = places.float()[:, None] * torch.exp(steps * (-math.log(10_000) / half))
    return torch.cat([angles.cos(), angles.sin()], 1)


def _normed(x: Tensor, condition: Tensor) -> Tensor:
    shift, scale = condition.chunk(2, -1)  # [B, 1, 2·C]
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and feed-forward, each scaled, shifted and gated by the condition (adaLN-Zero).

    Args:
        width: C; the feed-forward has 4·C inner units.
        attention: a self-attention of width C.
    """

    def __init__(self, width: int, attention: Attention):
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, tuple[Routing, ...]]:
        """One layer.

        Args:
            x: the patches, [B, T, C].
            condition: the condition of each image, [B, C].

        Returns:
            The patches, [B, T, C], and the routings of the attention.
        """
        width = x.size(-1)
        parts = self.condition(F.silu(condition)).unsqueeze(1).split([2 * width, width] * 2, -1)
        heads, routings = self.attention(_normed(x, parts[0]), with_routing=True)
        x = x + parts[1] * heads
        return x + parts[3] * self.mlp(_normed(x, parts[2])), routings


class DiT(nn.Module):
    """Predicts the noise in square latent images, and its variance, from the noise level and a class.

    Args:
        size: a name in SIZES.
        layers: (number of layers, (heads, h_s, K)) by depth, such as MIXTURES["XL", 90]; None: dense.
        image_size: the pixels of a side in latent space, a multiple of the patches' side, 2.
        channels: the channels of an image in latent space.
        classes: the number of classes; one more class means "no class".
        settings: keywords of `MixtureOfHeads`; moh_scaling is "released" unless given, as in the authors'
            code.

    Raises:
        UserError: for an unknown size, and for layers or an image_size that do not fit it.
    """

    def __init__(
        self,
        size: str = "S",
        layers: Sequence[tuple[int, Sequence[int]]] | None = None,
        image_size: int = 32,
        channels: int = 4,
        classes: int = 1000,
        **settings: Any,
    ):
        super().__init__()
        check_choice("size", size, SIZES)
        depth, width, num_heads = SIZES[size]
        by_depth = [sizes for times, sizes in layers or [(depth, ())] for _ in range(times)]
        if len(by_depth) != depth or image_size % PATCH:
            raise UserError(
                f"layers has {len(by_depth)} entries and image_size is {image_size}: DiT-{size} needs "
                f"{depth} layers and a multiple of its patch size, {PATCH}."
            )
        self.side = image_size // PATCH
        self.classes = classes
        self.patches = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        half = waves(torch.arange(self.side), width // 2)
        # Encodings of columns, then of rows
        places = [
            half.repeat(self.side, 1),
            half.repeat_interleave(self.side, 0),
        ]
        self.positions = nn.Parameter(torch.cat(places, 1), requires_grad=False)
        self.level = nn.Sequential(
            nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList()
        for sizes in by_depth:
            attention: Attention = DenseAttention(width, num_heads, self_attention=True)
            if sizes:
                options: Any = {"moh_scaling": "released", "head_dim": width // num_heads}
                options |= {"moh_shared_heads": sizes[1], "experts_per_token": sizes[2]} | settings
                attention = MixtureOfHeads(width, sizes[0], self_attention=True, **options)
            self.blocks.append(Block(width, attention))
        self.condition = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, 2 * channels * PATCH**2)
        # Each block starts as the identity, and the output as zero
        for name, parameter in self.named_parameters():
            if "condition." in name or name.startswith("out."):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.label.weight, std=0.02)

    def forward(
        self, images: Tensor, level: Tensor, classes: Tensor, with_routing: bool = False
    ) -> Any:
        """One step of denoising. In training, a random tenth of the images lose their class.

        Args:
            images: noisy images, [B, C, S, S], where S is image_size and C the number of channels.
            level: noise levels up to 1,000, [B].
            classes: the classes, [B] int64; the model's `classes` means "no class".
            with_routing: whether to return the routings, too.

        Returns:
            Noise and variance, [B, 2·C, S, S]. If with_routing, a pair of this and a list of `Routing` by
            depth, without the dense layers.

        Raises:
            UserError: for a shape or a class that this model was not built for.
        """
        self._check(images, level, classes)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        if self.training:
            dropped = torch.rand(classes.shape, device=classes.device) < CLASS_DROPOUT
            classes = classes.masked_fill(dropped, self.classes)
        condition = self.level(waves(level, FREQUENCIES).to(x.dtype)) + self.label(classes)
        routings: list[Routing] = []
        for block in self.blocks:
            x, routed = block(x, condition)
            routings.extend(routed)
        rows = self.out(_normed(x, self.condition(F.silu(condition)).unsqueeze(1))).transpose(1, 2)
        out = F.pixel_shuffle(rows.unflatten(2, (self.side, self.side)), PATCH)
        return (out, routings) if with_routing else out

    def _check(self, images: Tensor, level: Tensor, classes: Tensor) -> None:
        side = self.side * PATCH
        expected = (self.patches.in_channels, side, side)
        if images.dim() != 4 or images.shape[1:] != expected:
            raise UserError(
                f"images has the shape {[*images.shape]}, and this model takes {['B', *expected]}. Build "
                "it with another image_size or channels."
            )
        for name, values in (("level", level), ("classes", classes)):
            if values.shape != images.shape[:1]:
                raise UserError(
                    f"{name} has the shape {[*values.shape]}. Give one value per image: [{images.size(0)}]."
                )
        # Reading values would wait for a GPU, and a graph cannot read them
        readable = classes.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and ((classes < 0) | (classes > self.classes)).any():
            raise UserError(
                f"classes has {classes.min()} to {classes.max()}. Give 0 to {self.classes - 1}, or "
                f"{self.classes} for no class."
            )
