"""Data that the trained models judge: voices, tones, noise, pictures and sentences, all made from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RATE = 16_000
#: Formants of vowels, in Hz: a, e, i, o, u, and the one of "bird".
_VOWELS = torch.tensor([
    [730.0, 1090, 2440], [530, 1840, 2480], [270, 2290, 3010],
    [570, 840, 2410], [300, 870, 2240], [490, 1350, 1690],
])  # fmt: skip
_WIDTHS = torch.tensor([80.0, 110, 160])

#: Sentences that mean the same, by topic; the topics of one row are related.
SENTENCES: Sequence[Sequence[tuple[str, str]]] = (
    (
        ("A man is playing a guitar.", "Someone plays the guitar."),
        ("A woman sings on a stage.", "A singer performs for an audience."),
        ("The band recorded a new album.", "A new record was made by the group."),
    ),
    (
        ("The cat sleeps on the sofa.", "A cat is napping on the couch."),
        ("A dog runs after a ball.", "The puppy chases a ball."),
        ("Birds are sitting on a wire.", "Some birds rest on a power line."),
    ),
    (
        ("Stocks fell sharply on Monday.", "Share prices dropped steeply at the start of the week."),
        ("The bank raised its interest rate.", "Interest rates were increased by the bank."),
        ("The company reported a record profit.", "Earnings of the firm were the highest ever."),
    ),
    (
        ("Heavy rain flooded the streets.", "The roads were under water after the downpour."),
        ("It will be sunny tomorrow.", "Tomorrow's forecast is clear skies."),
        ("Snow closed the mountain pass.", "The pass is shut because of snowfall."),
    ),
    (
        ("She is slicing an onion.", "A woman cuts up onions."),
        ("He bakes bread every morning.", "Each morning he makes a fresh loaf."),
        ("The soup needs more salt.", "There is too little salt in the soup."),
    ),
    (
        ("The train to Paris was late.", "The Paris train arrived behind schedule."),
        ("A plane landed at the airport.", "An aircraft touched down on the runway."),
        ("They rode their bikes to school.", "The children cycled to class."),
    ),
    (
        ("The vaccine protects against the virus.", "Immunization guards people from the infection."),
        ("The doctor examined the patient.", "A physician looked at the sick person."),
        ("He broke his leg while skiing.", "A skiing accident fractured his leg."),
    ),
    (
        ("The team won the final match.", "The last game ended with a victory for the team."),
        ("She ran a marathon in three hours.", "It took her three hours to finish the marathon."),
        ("The goalkeeper saved a penalty.", "A penalty kick was stopped by the keeper."),
    ),
)  # fmt: skip


def generator(seed: int) -> torch.Generator:
    """Returns a generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def between(low: float, high: float, g: torch.Generator, *shape: int) -> Tensor:
    """Returns uniform numbers."""
    return low + (high - low) * torch.rand(shape, generator=g)


def pitch_track(samples: int, g: torch.Generator, low: float = 90, high: float = 320) -> Tensor:
    """Returns a pitch in Hz for each sample that glides and vibrates as in speech."""
    time = torch.arange(samples) / RATE
    start, end = between(low, high, g, 2).log()
    glide = start + (end - start) * time / time[-1]
    vibrato = 0.01 * torch.sin(2 * math.pi * (between(4, 6, g) * time + between(0, 1, g)))
    return (glide + vibrato).exp()


def voiced(pitch: Tensor, vowels: Tensor, *, tract: float = 1.0, tilt: float = 1.0) -> Tensor:
    """Returns harmonics of a pitch, each as loud as the formants at its frequency have it.

    Args:
        pitch: Hz, [samples].
        vowels: indices of vowels, [segments].
        tract: What formants are multiplied by: a shorter tract has higher ones.
        tilt: How fast higher harmonics fade.
    """
    samples = len(pitch)
    formants = tract * _VOWELS[vowels].T[None]  # [1, 3, segments]
    formants = torch.nn.functional.interpolate(formants, samples, mode="linear")[0]
    phase = 2 * math.pi * torch.cumsum(pitch.double() / RATE, 0)
    sound = torch.zeros(samples)
    for k in range(1, 41):
        frequency = k * pitch
        gaps = (frequency - formants) / _WIDTHS[:, None]
        loudness = (1 / (1 + gaps**2)).sum(0) / k**tilt
        sound += loudness * (frequency < 0.47 * RATE) * torch.sin(k * phase).float()
    return sound / sound.abs().max()


def voice(speaker: int, seed: int, seconds: float) -> Tensor:
    """Returns an utterance of a speaker: pitch, tract and tilt are theirs, the vowels are the seed's."""
    mine, g = generator(1000 + speaker), generator(seed)
    pitch, tract, tilt = (between(a, b, mine) for a, b in ((90, 260), (0.85, 1.2), (0.6, 1.4)))
    samples = int(seconds * RATE)
    track = pitch * pitch_track(samples, g, 0.85, 1.18)
    vowels = torch.randint(0, len(_VOWELS), (max(int(seconds * 5), 2),), generator=g)
    sound = voiced(track, vowels, tract=float(tract), tilt=float(tilt))
    rhythm = 0.55 - 0.45 * torch.cos(2 * math.pi * 4 * torch.arange(samples) / RATE)
    breath = 0.01 * torch.randn(samples, generator=g)
    return 0.5 * sound * rhythm + breath


def noise(samples: int, g: torch.Generator) -> Tensor:
    """Returns noise whose power falls with the frequency, as that of rooms and streets does."""
    spectrum = torch.fft.rfft(torch.randn(samples, generator=g))
    sound = torch.fft.irfft(spectrum / torch.arange(1, len(spectrum) + 1) ** 0.5, samples)
    return sound / sound.std()


def at_ratio(sound: Tensor, other: Tensor, decibels: float) -> Tensor:
    """Returns the sound with `other` so many decibels below it."""
    return sound + other * sound.std() / other.std() * 10 ** (-decibels / 20)


def mel_bands(bands: int, size: int, rate: int = RATE) -> Tensor:
    """Returns triangles over mel-spaced frequencies, of equal area: [bands, size // 2 + 1], as librosa's."""
    edges = torch.linspace(0, _mel(rate / 2), bands + 2)
    edges = torch.where(
        edges < 15, edges * 200 / 3, 1000 * (math.log(6.4) / 27 * (edges - 15)).exp()
    )
    bins = torch.linspace(0, rate / 2, size // 2 + 1)
    up = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(up, down).clamp_min(0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def _mel(frequency: float) -> float:
    """Returns a frequency above 1000 Hz on Slaney's scale."""
    return 15 + 27 * math.log(frequency / 1000) / math.log(6.4)


def photo(name: str) -> Tensor:
    """Returns a picture of scikit-image's or scikit-learn's, [height, width, 3] from 0 to 255."""
    if name in {"china.jpg", "flower.jpg"}:
        from sklearn.datasets import load_sample_image

        found = load_sample_image(name)
    else:
        import skimage.data

        found = getattr(skimage.data, name)()
    return torch.from_numpy(found.copy()).float()
