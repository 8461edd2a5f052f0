"""The U-Transformer: a U-Net with attention and long skips, which takes noise out of images.

The layout is that of the denoising U-Net of Rombach et al. (arXiv 2112.10752); the sizes c, 2c, 4c,
4c on images of 32 x 32 are those with which Zhuang et al. (arXiv 2211.05322) measure pipelines:

    enter -> down.0 -> down.1 -> down.2 -> down.3 -> middle -> up.0 -> up.1 -> up.2 -> up.3 -> leave

Every block and every halving on the way down leaves a skip, and a block on the way up reads each,
the last one first: in a pipeline they go from early stages straight to late ones. Attention is
among the positions of one image; there is no text or other condition.

Letters: B micro-batch, C channels, H and W positions, T width of the time embedding.
It is a plain module for `interlace.compile_step`, and no model file of `interlace train`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.errors import InputError, nearest

_LONGEST_PERIOD = 10_000.0
_LEVEL_SCALE = 1_000.0
"""Noise levels of 0 to 1 are spread over the 1000 steps for which the sinusoids were made."""


@dataclass(frozen=True, kw_only=True)
class UTransformerConfig:
    """Sizes of a U-Transformer. Raises InputError for sizes that do not fit each other."""

    channels: int
    """Channels c of the finest level; also the width of one sinusoid embedding of the time."""
    multiples: tuple[int, ...] = (1, 2, 4, 4)
    """Channels of each level, as multiples of c; each level halves the image of the one before."""
    attention: tuple[bool, ...] = (True, True, True, False)
    """Whether blocks of a level attend; the middle always does."""
    layers: int = 1
    """Blocks of each level on the way down; one more on the way up."""
    heads: int = 8
    feed_forward: int = 2
    """Inner width of an attention block's two linear layers, as a multiple of its channels."""
    groups: int = 32
    """Of every group norm."""
    image: int = 32
    """Height and width of images."""
    channels_in: int = 3
    channels_out: int = 4

    def __post_init__(self) -> None:
        for name in ("channels", "layers", "heads", "feed_forward", "groups", "image",
                     "channels_in", "channels_out"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} is below 1", hint=f"raise {name}")
        if not self.multiples or min(self.multiples) < 1:
            raise InputError(
                f"multiples = {self.multiples} names no level, or one without channels",
                hint="give one positive number per level, such as (1, 2, 4, 4)",
            )
        if len(self.attention) != len(self.multiples):
            raise InputError(
                f"attention says {len(self.attention)} levels, and multiples {len(self.multiples)}",
                hint="give both one entry per level",
            )
        halvings = len(self.multiples) - 1
        if self.image % 2**halvings:
            raise InputError(
                f"image = {self.image} cannot be halved {halvings} times",
                hint=f"make it a multiple of {2**halvings}, or name fewer levels in multiples",
            )
        for name in ("heads", "groups"):
            if self.channels % getattr(self, name):
                raise InputError(
                    f"channels = {self.channels} is no multiple of {name} = {getattr(self, name)}",
                    hint=f"set {name} to a divisor of channels",
                )
        if self.channels % 2:
            raise InputError(
                f"channels = {self.channels} is odd, and the time embedding has as many sines as "
                "cosines",
                hint="make channels even",
            )


PRESETS = {
    "470m": UTransformerConfig(channels=320),
    "1b": UTransformerConfig(channels=480),
    "2b": UTransformerConfig(channels=672),
    "small": UTransformerConfig(
        channels=16, multiples=(1, 2, 2, 2), attention=(False, True, True, True), heads=2, groups=4,
        channels_in=1, channels_out=1,
    ),
}  # fmt: skip
"""Sizes by name. 470M, 1B and 2B have the channels of arXiv 2211.05322, and 470, 1057 and 2072
million parameters: `feed_forward` is chosen so that counts come near the names. `small` is for the
digits of `interlace.data.digits` on a laptop."""


def preset(name: str) -> UTransformerConfig:
    """The sizes of that name. Raises InputError for an unknown one."""
    if name not in PRESETS:
        raise InputError(f"there is no U-Transformer {name!r}", hint=nearest(name, tuple(PRESETS)))
    return PRESETS[name]


class ConvolutionBlock(nn.Module):
    """Two convolutions of 3 x 3 around the time's shift, added to the input."""

    def __init__(self, config: UTransformerConfig, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, channels_in)
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(4 * config.channels, channels)
        self.second_norm = nn.GroupNorm(config.groups, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        same = channels_in == channels
        self.match = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1)

    def forward(self, x_BCHW: Tensor, time_BT: Tensor) -> Tensor:
        """[B, C in, H, W] and [B, T] -> [B, C, H, W]."""
        inner = self.first(F.silu(self.norm(x_BCHW)))
        inner = inner + self.time(F.silu(time_BT))[:, :, None, None]
        return self.match(x_BCHW) + self.second(F.silu(self.second_norm(inner)))


class ImageAttention(nn.Module):
    """Attention among the positions of an image, then a feed-forward, each added to its input."""

    def __init__(self, config: UTransformerConfig, channels: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.GroupNorm(config.groups, channels)
        self.mixed = nn.Linear(channels, 3 * channels, bias=False)
        self.output = nn.Linear(channels, channels)
        self.ffn_norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, config.feed_forward * channels)
        self.down = nn.Linear(config.feed_forward * channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        batch, channels, height, width = x_BCHW.shape
        x_BPC = x_BCHW.flatten(2).transpose(1, 2)
        mixed = self.mixed(self.norm(x_BCHW).flatten(2).transpose(1, 2))
        parts = mixed.view(batch, height * width, 3, self.heads, channels // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x_BPC = x_BPC + self.output(found.reshape(batch, height * width, channels))
        x_BPC = x_BPC + self.down(F.gelu(self.up(self.ffn_norm(x_BPC))))
        return x_BPC.transpose(1, 2).reshape(batch, channels, height, width)


class UBlock(nn.Module):
    """A convolution block, with attention behind it where the level attends."""

    def __init__(
        self, config: UTransformerConfig, channels_in: int, channels: int, *, attends: bool
    ) -> None:
        super().__init__()
        self.convolution = ConvolutionBlock(config, channels_in, channels)
        self.attention = ImageAttention(config, channels) if attends else nn.Identity()

    def forward(self, x_BCHW: Tensor, time_BT: Tensor) -> Tensor:
        """[B, C in, H, W] and [B, T] -> [B, C, H, W]."""
        return self.attention(self.convolution(x_BCHW, time_BT))


class DownLevel(nn.Module):
    """Blocks of one level, and the way to the next coarser one, if there is one."""

    def __init__(
        self, config: UTransformerConfig, level: int, channels_in: int, skips: list[int]
    ) -> None:
        """Adds the channels of its skips to `skips`."""
        super().__init__()
        channels = config.channels * config.multiples[level]
        attends = config.attention[level]
        self.blocks = nn.ModuleList(
            UBlock(config, channels if index else channels_in, channels, attends=attends)
            for index in range(config.layers)
        )
        skips.extend([channels] * config.layers)
        self.shrink: nn.Conv2d | None = None
        if level < len(config.multiples) - 1:
            self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            skips.append(channels)

    def forward(self, x_BCHW: Tensor, time_BT: Tensor) -> list[Tensor]:
        """What each block makes, and the halved image: the skips, of which the last goes on."""
        skips = []
        for block in self.blocks:
            x_BCHW = block(x_BCHW, time_BT)
            skips.append(x_BCHW)
        if self.shrink is not None:
            skips.append(self.shrink(x_BCHW))
        return skips


class Middle(nn.Module):
    """The coarsest blocks: with attention, then without."""

    def __init__(self, config: UTransformerConfig, channels: int) -> None:
        super().__init__()
        self.first = UBlock(config, channels, channels, attends=True)
        self.second = UBlock(config, channels, channels, attends=False)

    def forward(self, x_BCHW: Tensor, time_BT: Tensor) -> Tensor:
        """[B, C, H, W] and [B, T] -> [B, C, H, W]."""
        return self.second(self.first(x_BCHW, time_BT), time_BT)


class UpLevel(nn.Module):
    """Blocks of one level, each with a skip beside its input, and the way to the next finer one."""

    def __init__(
        self, config: UTransformerConfig, level: int, channels_in: int, skips: list[int]
    ) -> None:
        """Takes the channels of the skips that it reads off the end of `skips`."""
        super().__init__()
        channels = config.channels * config.multiples[level]
        attends = config.attention[level]
        self.blocks = nn.ModuleList(
            UBlock(
                config,
                (channels if index else channels_in) + skips.pop(),
                channels,
                attends=attends,
            )
            for index in range(config.layers + 1)
        )
        self.grow = Grow(channels, channels, 3, padding=1) if level else None

    def forward(self, x_BCHW: Tensor, skips: list[Tensor], time_BT: Tensor) -> Tensor:
        """[B, C in, H, W], as many skips as there are blocks and [B, T] -> [B, C, H, W], or
        [B, C, 2 H, 2 W] where there is a finer level."""
        for block, skip_BCHW in zip(self.blocks, skips, strict=True):
            x_BCHW = block(torch.cat((x_BCHW, skip_BCHW), dim=1), time_BT)
        return x_BCHW if self.grow is None else self.grow(x_BCHW)


class Grow(nn.Conv2d):
    """A convolution of the doubled image. It doubles the image itself, so that a chunk of a
    pipeline that begins with it is handed the small one."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, 2 H, 2 W]."""
        return super().forward(_doubled(input))


class TimeEmbedding(nn.Module):
    """Sines and cosines of the noise level at c / 2 frequencies, through two linear layers."""

    frequencies: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        powers = torch.arange(half) / half
        frequencies = _LEVEL_SCALE * torch.exp(-math.log(_LONGEST_PERIOD) * powers)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.first = nn.Linear(channels, 4 * channels)
        self.second = nn.Linear(4 * channels, 4 * channels)

    def forward(self, level_B: Tensor) -> Tensor:
        """[B], 0 (no noise) to 1 (nothing else) -> [B, T], T = 4 c."""
        angle = level_B[:, None] * self.frequencies
        return self.second(F.silu(self.first(torch.cat((angle.sin(), angle.cos()), dim=1))))


class UTransformer(nn.Module):
    """Noisy images and their noise levels -> images."""

    def __init__(self, config: UTransformerConfig) -> None:
        super().__init__()
        self.config = config
        levels = range(len(config.multiples))
        width = [config.channels * multiple for multiple in config.multiples]
        self.time = TimeEmbedding(config.channels)
        self.enter = nn.Conv2d(config.channels_in, config.channels, 3, padding=1)
        skips = [config.channels]
        self.down = nn.ModuleList(
            DownLevel(config, level, width[max(level - 1, 0)] if level else config.channels, skips)
            for level in levels
        )
        self.middle = Middle(config, width[-1])
        self.up = nn.ModuleList(
            UpLevel(config, level, width[min(level + 1, len(width) - 1)], skips)
            for level in reversed(levels)
        )
        self.leave = nn.Sequential(
            nn.GroupNorm(config.groups, width[0]),
            nn.SiLU(),
            nn.Conv2d(width[0], config.channels_out, 3, padding=1),
        )

    def forward(self, noisy_BCHW: Tensor, level_B: Tensor) -> Tensor:
        """[B, channels in, H, W] and noise levels [B] of 0 to 1 -> [B, channels out, H, W]."""
        time_BT = self.time(level_B)
        skips = [self.enter(noisy_BCHW)]
        for down in self.down:
            skips += down(skips[-1], time_BT)
        x_BCHW = self.middle(skips[-1], time_BT)
        for up in self.up:
            read = [skips.pop() for _ in range(self.config.layers + 1)]
            x_BCHW = up(x_BCHW, read, time_BT)
        return self.leave(x_BCHW)


def _doubled(x_BCHW: Tensor) -> Tensor:
    """Each position four times. As views and one copy, its gradient is a sum of fixed order, which
    that of `interpolate` is not on every device."""
    batch, channels, height, width = x_BCHW.shape
    wide = x_BCHW[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return wide.reshape(batch, channels, 2 * height, 2 * width)
