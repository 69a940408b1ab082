"""``hmpx check``: checks op lists, policy files, contracts and ONNX files; compares two checkpoints."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Final

from .. import checking, policy
from ..errors import OptionError, short
from . import output

TEXT: Final = f"""\
find the faults of op lists, policy files, contracts and ONNX files
---
hmpx check [--bf16 FILE] [--fp16 FILE] [--fp32 FILE] [FILE_OR_DIR...]
       hmpx check MODEL.onnx...
       hmpx check --state BEFORE AFTER
---
Prints every fault of op lists, policy files and contracts as FILE:LINE: MESSAGE: names
that torch does not know, repeated lines, ops that are in two lists, unknown keys. Of ONNX files, what
strongly typed engines refuse: mixed inputs, types that an operator does not take; nodes off the policy in
files of hmpx export; needless casts. With --state, the tensors of two checkpoints whose shape, dtype or
precision differs.
---
files FILE_OR_DIR*  a policy file (.yaml, .yml, .json); a directory of op lists; or an op list: its kind
  is fp32 or fp16 if its name contains that, {policy.FILE_NAMES["widest"]} names ops that follow their widest input,
  any other is the low-precision list
--bf16 FILE  an op list for bf16, whatever its name; may be repeated
--fp16 FILE  an op list for fp16, whatever its name; may be repeated
--fp32 FILE  an op list for fp32, whatever its name; may be repeated
--state FILE FILE  two files of tensors, .safetensors or of torch.save
---
exit status:
  0 no fault; 1 faults; 2 wrong arguments

examples:
  hmpx check my_bf16.txt my_fp32.txt
  hmpx check lists
  hmpx check policy.yaml gaudi_config.json contract.yaml
  hmpx check model.onnx
  hmpx check --state trained.safetensors served.safetensors"""

SETTINGS: Final = {kind: {"action": "append", "default": []} for kind in ("bf16", "fp16", "fp32")}


def run(options: argparse.Namespace) -> int:
    """Prints the errors in the given files; status 1 if there are any."""
    if options.state:
        found = checking.differences(*map(checking.read_state, options.state))
        return output.show(found or ["no differences"], status=1 if found else 0)
    graphs = [each for each in options.files if each.endswith(".onnx")]
    if graphs:
        return _check_graphs(options, graphs)
    files: dict[str, list[str]] = {kind: [] for kind in (*policy.LIST_KINDS, "policy")}
    kept = [each for each in options.files if checking.is_contract(each)]
    lines = sum(len(checking.read(each)) for each in kept)
    options.files = [each for each in options.files if each not in kept]
    if kept and not (options.files or options.bf16 or options.fp16 or options.fp32):
        checked = f"{output.counted(len(kept), 'contract')}, {output.counted(lines, 'line')}"
        return output.show([f"{checked}: no faults"])
    files["low"] += options.bf16
    files["fp16"] += options.fp16
    files["fp32"] += options.fp32
    for path in itertools.chain.from_iterable(map(_files, options.files)):
        files[_kind(path)].append(path)
    count = sum(map(len, files.values()))
    if not count:
        options.parser.error("name at least one op list or policy file")
    faults = policy.check_files({kind: tuple(paths) for kind, paths in files.items()})
    if faults:
        return output.show(faults, status=1)
    of_policies = [
        policy.read_policy_file(path).op_lists()
        for path in files.pop("policy")
        if Path(path).name != policy.OPTIONS_NAME
    ]
    lists = [*itertools.chain(*of_policies)]
    lists += [policy.read_list(path, kind) for kind, paths in files.items() for path in paths]
    op_count = sum(len(each.ops) for each in lists)
    checked = f"{output.counted(count, 'file')}, {output.counted(op_count, 'op')}"
    return output.show([f"{checked}: no faults"])


def _check_graphs(options: argparse.Namespace, paths: list[str]) -> int:
    if len(paths) < len(options.files) or options.bf16 or options.fp16 or options.fp32:
        options.parser.error("check ONNX files by a command of their own")
    from ..exporting import read_onnx  # slow to import

    found = [*map(read_onnx, paths)]
    lines = itertools.chain.from_iterable([*str(each).splitlines(), ""] for each in found)
    return output.show([*lines][:-1], status=1 if any(each.faults for each in found) else 0)


#: Written by `hmpx.tune` next to lists.
_REPORT: Final = "report.txt"


def _files(path: str) -> list[str]:
    """Returns the file ``path`` without reports, or the lists and policy files of a directory."""
    if Path(path).name == _REPORT:
        return []
    if not Path(path).is_dir():
        return [path]
    names, suffixes = policy.FILE_NAMES.values(), (".yaml", ".yml")
    inside = sorted(Path(path).iterdir())
    found = [each for each in inside if each.name in names or each.suffix in suffixes]
    if not found:
        raise OptionError(f"{short(path)} holds neither {', '.join(names)} nor a policy file")
    return [str(each) for each in found]


def _kind(path: str) -> str:
    name = Path(path).name.lower()
    if policy.is_policy_file(name):
        return "policy"
    if name == policy.FILE_NAMES["widest"]:
        return "widest"
    return "fp32" if "fp32" in name else "fp16" if "fp16" in name else "low"
