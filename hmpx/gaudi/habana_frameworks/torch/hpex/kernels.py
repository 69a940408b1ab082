"""``habana_frameworks.torch.hpex.kernels``: fused kernels, as far as torch computes the same.

They compute in the types that they are given, as on a Gaudi, where HMP does not cover them.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from .....torch_state import disable_casts
from ...absent import GaudiError, absent, unknown

# --- attention ---------------------------------------------------------------------------------


class FusedSDPA:
    """`torch.nn.functional.scaled_dot_product_attention`, with Habana's arguments."""

    @staticmethod
    def apply(  # noqa: PLR0917  # Habana's positional order
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of ``q`` [b, h, s_q, d] to ``k`` and ``v`` [b, h_kv, s, d].

        ``softmax_mode`` and ``recompute_mode`` choose between Habana's kernels, and have no effect.

        Raises:
            GaudiError: An argument asks for a result that torch does not return.
        """
        for name, is_asked in (
            ("return_dropout_mask", return_dropout_mask),
            ("return_attn_probs", return_attn_probs),
            ("window_size", tuple(window_size) != (-1, -1)),
            ("sink", sink is not None),
        ):
            if is_asked:
                raise GaudiError(
                    f"FusedSDPA.apply({name}=...) needs a Gaudi; compute the attention with "
                    "torch.matmul and torch.softmax instead"
                )
        mask = attn_mask
        if valid_seq_len is not None:
            mask = _both(mask, _valid(k, valid_seq_len, seq_padding_type))
        if is_causal and mask is not None:  # torch takes one or the other
            causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            mask, is_causal = _both(mask, causal), False
        with disable_casts():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=q.dim() == 4 and q.shape[1] != k.shape[1],
            )


def _valid(k: Tensor, lengths: Tensor, padding: str) -> Tensor:
    """Returns which keys are not padding: [b, 1, 1, s] for ``k`` [b, h, s, d]."""
    size = k.shape[-2]
    positions = torch.arange(size, device=k.device)
    ends = lengths.to(k.device).reshape(-1, *[1] * (k.dim() - 1))
    return positions < ends if padding.lower() == "right" else positions >= size - ends


def _both(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """Returns ``mask``, a boolean or an additive one, restricted to where ``allowed`` is true."""
    if mask is None:
        return allowed
    if mask.dtype is torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, float("-inf"))


# --- rotary embeddings -------------------------------------------------------------------------


class RotaryPosEmbeddingMode(enum.Enum):
    """Which elements are rotated together."""

    BLOCKWISE = 0  #: element i of the first half with element i of the second
    PAIRWISE = 1  #: neighbours


def apply_rotary_pos_emb(p: Tensor, *args: Any) -> Tensor:
    """Returns ``p`` rotated according to its positions.

    Args:
        p: Queries or keys: [b, h, s, d] or [s, b, h, d].
        *args: ``cos, sin, position_ids=None, offset=0, mode=BLOCKWISE``; or the cache of ChatGLM's
            cosines and sines alone, [s, b, d/2, 2].
    """
    if len(args) == 1:
        return _rotated_by_cache(p, args[0])
    cos, sin, *rest = args
    usual: list[Any] = [None, 0, RotaryPosEmbeddingMode.BLOCKWISE]
    position_ids, offset, mode = [*rest, *usual[len(rest) :]]
    mode = RotaryPosEmbeddingMode(mode)
    with disable_casts():
        if mode is RotaryPosEmbeddingMode.BLOCKWISE:
            cos, sin = (_at(each, p, position_ids, offset) for each in (cos, sin))
        dtypes = {each.dtype for each in (p, cos, sin)}
        dtype = torch.float32 if torch.float32 in dtypes else p.dtype
        p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
        rotated: Tensor = p * cos + _turned(p, mode) * sin
    return rotated


def _at(table: Tensor, p: Tensor, position_ids: Tensor | None, offset: int) -> Tensor:
    """Returns the cosines or sines for ``p``'s positions."""
    if position_ids is not None:
        rows = table.reshape(-1, table.shape[-1])  # [1, 1, s, d] -> [s, d]
        return rows[position_ids].unsqueeze(1)  # [b, 1, s, d]
    is_first = table.dim() == p.dim() and table.shape[0] != 1  # [s, 1, 1, d]
    axis = 0 if is_first else -2
    return table.narrow(axis, offset, min(p.shape[axis], table.shape[axis] - offset))


def _turned(p: Tensor, mode: RotaryPosEmbeddingMode) -> Tensor:
    """Returns ``p`` rotated by a right angle."""
    if mode is RotaryPosEmbeddingMode.PAIRWISE:
        return torch.stack((-p[..., 1::2], p[..., ::2]), dim=-1).flatten(-2)
    first, second = p.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotated_by_cache(p: Tensor, cache: Tensor) -> Tensor:
    """Returns ``p`` [s, b, h, d] with its first elements rotated; the cache's size says how many."""
    length, width = p.shape[0], 2 * cache.shape[-2]
    cos, sin = (
        cache[:length, ..., i].repeat_interleave(2, dim=-1).reshape(length, -1, 1, width)
        for i in (0, 1)
    )
    mode = RotaryPosEmbeddingMode.PAIRWISE
    dtype = p.dtype
    rotated = apply_rotary_pos_emb(p[..., :width], cos.to(dtype), sin.to(dtype), None, 0, mode)
    return torch.cat((rotated, p[..., width:]), dim=-1)


class RotaryPosEmbeddingHelperV1:
    """Rotates by an offset into the table."""

    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, offset: int = 0) -> Tensor:
        """Returns ``p`` rotated."""
        return apply_rotary_pos_emb(p, cos, sin, None, offset)


RotaryPosEmbeddingHelper = RotaryPosEmbeddingHelperV1  # the original name


class RotaryPosEmbeddingHelperV2:
    """Rotates by positions."""

    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        """Returns ``p`` rotated."""
        return apply_rotary_pos_emb(p, cos, sin, position_ids)


class RotaryPosEmbeddingHelperV3:
    """Rotates by ChatGLM's cache."""

    @staticmethod
    def apply(p: Tensor, rope_cache: Tensor) -> Tensor:
        """Returns ``p`` rotated."""
        return apply_rotary_pos_emb(p, rope_cache)


# --- others ------------------------------------------------------------------------------------


class CTCLoss:
    """`torch.nn.functional.ctc_loss`."""

    @staticmethod
    def apply(  # noqa: PLR0917  # Habana's positional order
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        """Returns the loss."""
        return F.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )


class CustomSoftmax:
    """Softmax over the last dimension; on a Gaudi an approximate one."""

    @staticmethod
    def apply(input: Tensor, flavor: int = 0) -> Tensor:  # Habana's name
        """Returns the softmax; ``flavor`` chooses between Habana's kernels, and has no effect."""
        with disable_casts():
            return torch.softmax(input, -1)


#: Kernels that torch has no function for -> what to use instead.
_ABSENT: Final = {
    "CustomNms": "call torchvision.ops.nms",
    "EmbeddingBag": "use torch.nn.EmbeddingBag",
    "EmbeddingBagPreproc": "use torch.nn.EmbeddingBag",
    "Fp8FusedSDPA": "use FusedSDPA",
    "MixtureOfExperts": "compute each expert with torch.nn.Linear",
    "RoiAlignFunction": "call torchvision.ops.roi_align",
    "ScaledMaskedSoftmax": "call torch.softmax",
    "fp8_fused_sdpa": "use FusedSDPA",
}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        return absent(__name__, name, _ABSENT[name])
    raise unknown(__name__, name)
