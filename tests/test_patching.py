"""Replace and undo, on a toy module: no torch function is touched here."""

from __future__ import annotations

import types

import pytest

from hmpx import patching
from hmpx.patching import Patch


class Base:
    inherited = "base"


class Child(Base):
    own = "child"


def test_apply_and_undo_restore_every_kind_of_slot() -> None:
    """An overwritten slot gets its old object back; a created one is deleted, not overwritten."""
    module = types.ModuleType("toy")
    module.present = present = object()  # type: ignore[attr-defined]
    before = dict(vars(module)), dict(vars(Child))
    applied = patching.apply(
        [Patch(module, "present", 1), Patch(module, "absent", 2), Patch(Child, "inherited", 3)]
    )
    assert (module.present, module.absent, Child.inherited) == (1, 2, 3)
    assert Base.inherited == "base"
    assert patching.undo(applied) == []
    assert module.present is present
    assert (dict(vars(module)), dict(vars(Child))) == before


def test_two_patches_of_one_slot_are_undone_newest_first() -> None:
    """Undoing oldest first would leave a wrapper behind."""
    module = types.ModuleType("toy")
    module.slot = "original"  # type: ignore[attr-defined]
    applied = patching.apply([Patch(module, "slot", "first"), Patch(module, "slot", "second")])
    patching.undo(applied)
    assert module.slot == "original"


def test_an_error_halfway_undoes_what_was_done() -> None:
    """All patches or none."""
    module = types.ModuleType("toy")
    module.slot = "original"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        patching.apply([Patch(module, "slot", "new"), Patch(int, "slot", "refused")])
    assert module.slot == "original"


def test_a_slot_patched_by_somebody_else_is_left_to_them() -> None:
    """Their patch stays, and the caller is told."""
    module = types.ModuleType("toy")
    module.slot = "original"  # type: ignore[attr-defined]
    applied = patching.apply([Patch(module, "slot", "ours")])
    module.slot = "theirs"  # type: ignore[attr-defined]
    assert [patch.attribute for patch in patching.undo(applied)] == ["slot"]
    assert module.slot == "theirs"
