"""Trained potentials: energies and forces, their training, and vibrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import data
from .scores import error_percent, mean_gap
from .task import Batch, Outputs, Task

#: Name -> space group, edge in angstrom, atoms and their places.
_CRYSTALS: Mapping[str, tuple[str, float, list[str], list[list[float]]]] = {
    "MgO": ("Fm-3m", 4.21, ["Mg", "O"], [[0, 0, 0], [0.5, 0.5, 0.5]]),
    "Si": ("Fd-3m", 5.43, ["Si"], [[0, 0, 0]]),
    "SrTiO3": ("Pm-3m", 3.91, ["Sr", "Ti", "O"], [[0, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0]]),
}


def _graphs(seed: int, names: Sequence[str] = tuple(_CRYSTALS)) -> list[dict[str, Any]]:
    """Returns CHGNet's graphs of crystals whose atoms are out of place, as plain tensors."""
    from chgnet.graph import CrystalGraphConverter
    from pymatgen.core import Lattice, Structure

    convert = CrystalGraphConverter(atom_graph_cutoff=6, bond_graph_cutoff=3, verbose=False)
    g = data.generator(seed)
    found = []
    for name in names:
        group, edge, atoms, places = _CRYSTALS[name]
        crystal = Structure.from_spacegroup(group, Lattice.cubic(edge), atoms, places)
        shifts = 0.08 * torch.randn(len(crystal), 3, generator=g)
        for k, shift in enumerate(shifts.tolist()):
            crystal.translate_sites([k], shift, frac_coords=False)
        graph = convert(crystal)
        found.append(
            {name: each for name, each in vars(graph).items() if name not in {"graph_id", "mp_id"}}
        )
        for each in found[-1].values():
            if isinstance(each, Tensor):
                each.requires_grad_(False)
    return found


def _chgnet(version: str = "0.3.0") -> nn.Module:
    import contextlib
    import io

    from chgnet.model import CHGNet

    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = CHGNet.load(model_name=version, use_device="cpu", verbose=False)
    return model.eval()


def _predict(model: nn.Module, batch: Batch) -> Outputs:
    """Returns energies per atom, all forces, stresses and moments."""
    from chgnet.graph import CrystalGraph

    graphs = []
    for each in batch["graphs"]:
        graph = CrystalGraph(**each)
        graph.atom_frac_coord = graph.atom_frac_coord.detach().clone().requires_grad_()
        graphs.append(graph)
    with torch.enable_grad():
        found = model(graphs, task="efsm")
    return {
        "energy": found["e"],
        "forces": torch.cat(found["f"]),
        "stress": torch.cat(found["s"]),
        "moments": torch.cat(found["m"]),
    }


def _detached(model: nn.Module, batch: Batch) -> Outputs:
    return {name: each.detach() for name, each in _predict(model, batch).items()}


def _labelled(seed: int) -> Batch:
    """Two crystals with energies and forces by the model that was trained on another functional."""
    graphs = _graphs(seed, ("MgO", "SrTiO3"))
    found = _detached(_chgnet("r2scan"), {"graphs": graphs})
    return {"graphs": graphs, "energy": found["energy"], "forces": found["forces"]}


def _training_step(model: nn.Module, batch: Batch) -> Outputs:
    """Returns the loss of energies and forces, and its gradients: forces are differentiated a second time."""
    with torch.enable_grad():
        return _loss_and_gradients(model, batch)


def _loss_and_gradients(model: nn.Module, batch: Batch) -> Outputs:
    found = _predict(model, batch)
    loss = nn.functional.huber_loss(found["energy"], batch["energy"], delta=0.1)
    loss = loss + nn.functional.huber_loss(found["forces"], batch["forces"], delta=0.1)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    parts = [
        torch.zeros_like(w) if d is None else d for w, d in zip(weights, gradients, strict=True)
    ]
    return {"loss": loss.detach(), "gradients": torch.cat([part.flatten() for part in parts])}


def _sevennet() -> nn.Module:
    from sevenn.util import load_checkpoint

    model: Any = load_checkpoint("7net-0").build_model()
    model.set_is_batch_data(False)
    model.delete_module_by_key("force_output")
    found: nn.Module = model.eval()
    return found


def _cells(seed: int) -> Batch:
    """A primitive cell, slightly out of shape, and its neighbours."""
    from ase.build import bulk
    from sevenn.train.dataload import unlabeled_atoms_to_graph

    g = data.generator(seed)
    cells = {"Si": ("diamond", 5.43), "MgO": ("rocksalt", 4.21), "GaAs": ("zincblende", 5.65)}
    crystals = []
    for name, (kind, edge) in cells.items():
        crystal = bulk(name, kind, a=edge * float(data.between(0.98, 1.02, g)))
        crystal.positions += 0.02 * torch.randn(2, 3, generator=g).numpy()
        graph = unlabeled_atoms_to_graph(crystal, 5.0, with_shift=True)
        fields = {
            k: torch.as_tensor(v) for k, v in graph.items() if k not in {"edge_vec", "data_info"}
        }
        fields["shift"] = fields["pbc_shift"].double() @ fields["cell_lattice_vectors"]
        fields["masses"] = torch.as_tensor(crystal.get_masses())
        crystals.append({k: v.float() if v.is_floating_point() else v for k, v in fields.items()})
    return {"crystals": crystals}


def _vibrate(model: nn.Module, batch: Batch) -> Outputs:
    """Returns forces, and vibrations at the zone's centre by the second derivatives of the energy."""
    forces, frequencies = [], []
    for crystal in batch["crystals"]:
        fields = dict(crystal)
        masses, shift = fields.pop("masses"), fields.pop("shift")
        with torch.enable_grad():
            places = fields["pos"].detach().clone().requires_grad_()
            source, target = fields["edge_index"]
            vectors = places[target] - places[source] + shift
            energy = model({**fields, "edge_vec": vectors})["inferred_total_energy"].sum()
            (slope,) = torch.autograd.grad(energy, places, create_graph=True)
            rows = [torch.autograd.grad(s, places, retain_graph=True)[0] for s in slope.flatten()]
        forces.append(-slope.detach())
        curvature = torch.stack([row.flatten() for row in rows]).detach().double()
        weights = masses.double().repeat_interleave(3).rsqrt()
        dynamical = weights[:, None] * (curvature + curvature.T) / 2 * weights
        values = torch.linalg.eigvalsh(dynamical)
        # eV / (angstrom^2 u) -> THz; imaginary ones are shown as negative
        frequencies.append(values.sign() * values.abs().sqrt() * 15.633302)
    return {"forces": torch.cat(forces), "frequencies": torch.cat(frequencies)}


def tasks() -> Sequence[Task]:
    """Returns the tasks."""
    return (
        Task(
            "CHGNet", "chgnet", "chgnet",
            "a graph network of crystals: energies, forces, stresses, magnetic moments; three crystals out of shape",
            _chgnet, lambda seed: {"graphs": _graphs(seed)}, _detached,
            {
                "error of the forces, %": error_percent("forces"),
                "of the forces, meV/A": mean_gap("forces", 1000),
                "of the energy, meV/atom": mean_gap("energy", 1000),
                "of the stress, GPa": mean_gap("stress", 1),
                "of the moments, mB": mean_gap("moments", 1),
            },
            is_distance=True,
        ),
        Task(
            "CHGNet, training", "chgnet", "chgnet",
            "the gradient of a loss on forces, which is differentiated twice; two crystals",
            _chgnet, _labelled, _training_step,
            {
                "error of the gradient, %": error_percent("gradients"),
                "of the loss, %": error_percent("loss"),
            },
            is_distance=True,
        ),
        Task(
            "SevenNet-0, vibrations", "sevenn", "sevenn",
            "an equivariant graph network: second derivatives of the energy of three cells of two atoms",
            _sevennet, _cells, _vibrate,
            {
                "error of the frequencies, %": error_percent("frequencies"),
                "of the frequencies, THz": mean_gap("frequencies", 1),
                "of the forces, meV/A": mean_gap("forces", 1000),
            },
            is_distance=True,
        ),
    )  # fmt: skip
