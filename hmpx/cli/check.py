"""``hmpx check``: checks op lists and policy files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import policy
from . import output
from .options import add_command, option


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx check``."""
    parser = add_command(
        commands,
        "check",
        run,
        help="find the faults of op lists and policy files",
        usage="hmpx check [--bf16 FILE] [--fp16 FILE] [--fp32 FILE] [FILES...]",
        description="Prints every fault of op lists and policy files as FILE:LINE: MESSAGE: names that"
        "\ntorch does not know, repeated lines, ops that are in two lists, unknown keys.",
        epilog="""\
exit status:
  0 no fault; 1 faults; 2 wrong arguments

example:
  hmpx check my_bf16.txt my_fp32.txt
  hmpx check policy.yaml gaudi_config.json""",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="policy files (.yaml, .yml, .json), or op lists: a file whose name contains fp32 or fp16 holds ops for that type, "
        f"{policy.FILE_NAMES['widest']} the ops that follow their widest input, "
        "any other name is the low-precision list",
    )
    for kind in ("bf16", "fp16", "fp32"):
        text = f"an op list for {kind}, whatever its name; may be repeated"
        option(parser, f"--{kind} FILE", text, action="append", default=[])


def run(options: argparse.Namespace) -> int:
    """Prints the errors in the given files; status 1 if there are any."""
    files: dict[str, list[str]] = {kind: [] for kind in (*policy.LIST_KINDS, "policy")}
    files["low"] += options.bf16
    files["fp16"] += options.fp16
    files["fp32"] += options.fp32
    for path in options.files:
        files[_kind(path)].append(path)
    count = sum(map(len, files.values()))
    if not count:
        options.parser.error("name at least one op list or policy file")
    faults = policy.check_files({kind: tuple(paths) for kind, paths in files.items()})
    if faults:
        return output.show(faults, status=1)
    op_count = sum(
        len(each.ops)
        for kind, paths in files.items()
        for path in paths
        for each in (
            policy.read_policy_file(path).op_lists()
            if kind == "policy"
            else [policy.read_list(path, kind)]
        )
    )
    return output.show(
        [f"{output.counted(count, 'file')}, {output.counted(op_count, 'op')}: no faults"]
    )


def _kind(path: str) -> str:
    name = Path(path).name.lower()
    if policy.is_policy_file(name):
        return "policy"
    if name == policy.FILE_NAMES["widest"]:
        return "widest"
    return "fp32" if "fp32" in name else "fp16" if "fp16" in name else "low"
