"""``hmpx check``, ``lists`` and ``ops``: op lists, and what they decide."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .. import checking, formats, policy, session
from ..checkpoints import is_checkpoint
from ..errors import OptionError, PolicyFileError, short
from ..files import make_directory, write
from ..reports import ReportTable
from . import functions, output
from .options import DEVICE_TYPES, LIST_SETTINGS, Command, device_options, list_options

#: Options that name op lists.
_KINDS: Final = ("bf16", "fp16", "fp32")

#: Suffixes of files that are not op lists -> the command for them.
_OTHERS: Final = {
    ".py": "hmpx lint runs a program and shows where it loses precision",
    ".jsonl": "hmpx diff-runs compares two traces, hmpx monitor shows figures over time",
    **dict.fromkeys((".pt", ".pth", ".bin"), "hmpx check --state compares two files of tensors"),
}

_CHECK: Final = f"""\
find the faults of op lists, policy files, contracts, ONNX files and checkpoints
---
hmpx check [--bf16 FILE] [--fp16 FILE] [--fp32 FILE] [FILE_OR_DIR...]
       hmpx check MODEL.onnx...
       hmpx check MODEL.onnx --model FILE.py:FUNCTION [--inputs FUNCTION] [list options]
       hmpx check CHECKPOINT_DIR [--model FILE.py:FUNCTION]
       hmpx check --state BEFORE AFTER
---
Prints every fault of op lists, policy files and contracts as FILE:LINE: MESSAGE: names
that torch does not know, repeated lines, ops that are in two lists, unknown keys. Of ONNX files, what
strongly typed engines refuse: mixed inputs, types that an operator does not take; nodes off the policy in
files of hmpx export; needless casts; with --model, each node's error against torch in ulps. Of a checkpoint of compressed-tensors: wrong, missing or doubled tensors,
scales and groups; with --model, also weights that are not the model's. With --state, the tensors of two checkpoints whose shape, dtype or
precision differs.
---
files FILE_OR_DIR*  a policy file (.yaml, .yml, .json); a directory of op lists; or an op list: its kind
  is fp32 or fp16 if its name contains that, {policy.FILE_NAMES["widest"]} names ops that follow their widest input,
  any other is the low-precision list
--bf16 FILE  an op list for bf16, whatever its name; may be repeated
--fp16 FILE  an op list for fp16, whatever its name; may be repeated
--fp32 FILE  an op list for fp32, whatever its name; may be repeated
--state FILE FILE  two files of tensors, .safetensors or of torch.save
--model FILE.py:FUNCTION  the function that returns the model, in float32, of one ONNX file or checkpoint
--inputs FUNCTION  function that returns the inputs of an ONNX file's model; default: inputs
--html FILE  write a page about one ONNX file or checkpoint
--json FILE  write its nodes or layers
--csv FILE  write a table of them
{LIST_SETTINGS}
{DEVICE_TYPES}
---
List options are those of the export, for --model with an ONNX file.
{functions.ABOUT_PROGRAM}

exit status:
  0 no fault; 1 faults; 2 wrong arguments

examples:
  hmpx check my_bf16.txt my_fp32.txt
  hmpx check lists
  hmpx check policy.yaml gaudi_config.json contract.yaml
  hmpx check model.onnx
  hmpx check model.onnx --model train.py:build_model --inputs make_batch --low-precision-type float16
  hmpx check served --model train.py:build_model
  hmpx check --state trained.safetensors served.safetensors"""


def _check(options: argparse.Namespace) -> int:
    """Prints the errors in the given files; status 1 if there are any."""
    if options.state:
        found = checking.differences(*map(checking.read_state, options.state))
        return output.show(found or ["no differences"], status=1 if found else 0)
    graphs = [each for each in options.files if each.lower().endswith(".onnx")]
    if graphs and options.model:
        return _check_values(options)
    for kind in _KINDS:
        setattr(options, f"{kind}_file_path", "")
    if list_options(options) or options.device_types or options.inputs:
        options.parser.error(
            "--inputs, --device-types and list options are for one ONNX file, with --model"
        )
    if graphs:
        return _check_graphs(options, graphs)
    if len(options.files) == 1 and is_checkpoint(options.files[0]):
        return _check_checkpoint(options)
    for each in options.files:
        given, name = Path(each), short(each)
        if not given.suffix and not given.exists():
            options.parser.error(
                f"{name}: no such file or directory; give an op list, a policy file or the directory of a checkpoint"
            )
        if given.exists() and (other := _OTHERS.get(given.suffix.lower())):
            options.parser.error(f"{name} is not an op list: {other}")
        if is_checkpoint(given):
            options.parser.error(f"{name} is a checkpoint; check it alone: hmpx check {name}")
        if given.suffix == ".safetensors" or (
            given.name == "config.json" and is_checkpoint(given.parent)
        ):
            folder = short(str(given.parent))
            options.parser.error(
                f"{name} is a file of a checkpoint; check its directory: hmpx check {folder}"
            )
    if options.html or options.json or options.csv or options.model:
        options.parser.error(
            "--html, --json, --csv and --model are for one ONNX file or checkpoint"
        )
    files: dict[str, list[str]] = {kind: [] for kind in (*policy.LIST_KINDS, "policy")}
    given_files = [*itertools.chain.from_iterable(map(_files, options.files))]
    kept = [each for each in given_files if checking.is_contract(each)]
    faults, lines = list[str](), 0
    for each in kept:
        try:
            lines += len(checking.read(each))
        except PolicyFileError as error:
            faults.append(str(error))
    rest = [each for each in given_files if each not in kept]
    if kept and not (rest or options.bf16 or options.fp16 or options.fp32):
        if faults:
            return output.show(faults, status=1)
        checked = f"{output.counted(len(kept), 'contract')}, {output.counted(lines, 'line')}"
        return output.show([f"{checked}: no faults"])
    files["low"] += options.bf16
    files["fp16"] += options.fp16
    files["fp32"] += options.fp32
    for path in rest:
        files[_kind(path)].append(path)
    count = sum(map(len, files.values()))
    if not count:
        options.parser.error("name at least one op list or policy file")
    faults += policy.check_files({kind: tuple(paths) for kind, paths in files.items()})
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

    is_written = options.html or options.json or options.csv
    if is_written and len(paths) > 1:
        options.parser.error("--html, --json and --csv are for one ONNX file")
    found = [*map(read_onnx, paths)]
    lines = [line for each in found for line in (*str(each).splitlines(), "")]
    written = output.written(options, found[0])
    return output.show([*lines[:-1], *written], status=1 if any(e.faults for e in found) else 0)


def _check_values(options: argparse.Namespace) -> int:
    """Checks an ONNX file, and compares its nodes with a model's ops."""
    if len(options.files) > 1:
        options.parser.error("--model is for one ONNX file")
    for kind in _KINDS:
        given = getattr(options, kind)
        if len(given) > 1:
            options.parser.error(f"--{kind} may be given once with --model")
        setattr(options, f"{kind}_file_path", next(iter(given), ""))
    options.inputs = options.inputs or "inputs"
    return _compare_values(options)


@functions.on_program
def _compare_values(options: argparse.Namespace, given: dict[str, Any]) -> int:
    from ..exporting import verify  # slow to import

    model, inputs = given["model"](), given["inputs"]()
    found = verify(
        options.files[0], model, inputs, **list_options(options), **device_options(options)
    )
    lines = [*str(found).splitlines(), *output.written(options, found)]
    return output.show(lines, status=1 if found.faults else 0)


def _check_checkpoint(options: argparse.Namespace) -> int:
    from ..checkpoints import read_checkpoint  # slow to import

    model = None
    if options.model:
        source, name = functions.split(options.model)
        with functions.as_program(source):
            model = functions.found(source, name)[1]()
    found = read_checkpoint(options.files[0], model)
    lines = [*str(found).splitlines(), *output.written(options, found)]
    return output.show(lines, status=1 if found.faults else 0)


CHECK: Final = Command(
    _CHECK,
    _check,
    {kind: {"action": "append", "default": []} for kind in _KINDS},
    writes=("html", "json", "csv"),
)


def _files(path: str) -> list[str]:
    """Returns the file ``path`` without reports, or the lists and policy files of a directory."""
    if Path(path).name == "report.txt":  # written by `hmpx.tune` next to lists
        return []
    if not Path(path).is_dir():
        return [path]
    names, suffixes = policy.FILE_NAMES.values(), (".yaml", ".yml")
    inside = sorted(Path(path).iterdir())
    found = [each for each in inside if each.name in names or each.suffix in suffixes]
    if not found:
        raise OptionError(
            f"{short(path)} holds neither {', '.join(names)}, a policy file nor a checkpoint"
        )
    return [str(each) for each in found]


def _kind(path: str) -> str:
    name = Path(path).name.lower()
    if policy.is_policy_file(name):
        return "policy"
    if name == policy.FILE_NAMES["widest"]:
        return "widest"
    return "fp32" if "fp32" in name else "fp16" if "fp16" in name else "low"


# --- shipped lists ----------------------------------------------------------------------------------

_LISTS: Final = """\
show the shipped op lists and where they are, or copy a set
---
hmpx lists [NAME] [--copy DIR]
---
Prints the shipped sets of op lists with their files. --copy writes a set to a directory,
where you can edit it; then convert(lists=DIR) or hmpx run --lists DIR takes it.
---
name NAME?  a set; default: all
--copy DIR  write the files of the set, hmpx by default, to DIR
---
exit status:
  0; 2 if there is no such set, or the files can't be written

examples:
  hmpx lists
  hmpx lists hmpx --copy my_lists"""


def _lists(options: argparse.Namespace) -> int:
    """Prints the sets, or copies one."""
    if options.copy:
        return output.show(_copied(options.name or "hmpx", Path(options.copy)))
    names = policy.set_names() if options.name is None else [options.name]
    return output.show(str(path) for name in names for path in _shipped_files(name))


def _shipped_files(name: str) -> list[Path]:
    if name not in policy.set_names():
        known = ", ".join(policy.set_names())
        raise OptionError(f"there is no set {short(name)!r}; the shipped ones are {known}")
    folder = policy.directory() / name
    return [folder / each for each in policy.FILE_NAMES.values() if (folder / each).is_file()]


def _copied(name: str, folder: Path) -> Iterator[str]:
    files = _shipped_files(name)
    make_directory(folder)
    for path in files:
        if (folder / path.name).exists():
            raise OptionError(
                f"{short(str(folder / path.name))} is there already; name another directory"
            )
    for path in files:
        write(path.read_bytes(), folder / path.name)
        yield f"wrote {short(str(folder / path.name))}"


LISTS: Final = Command(_LISTS, _lists)


# --- schemas of files -------------------------------------------------------------------------------

_SCHEMA: Final = """\
show the JSON Schemas of policy files and contracts, for editors
---
hmpx schema [--vscode | --modeline]
---
Prints the files with the JSON Schemas of policy files, of contracts and of options.yaml beside
lists. Editors check and complete with them.
---
--vscode  print the setting of VS Code's YAML extension that applies them to policy.yaml,
  my.policy.yaml, contract.yaml and my.contract.yaml
--modeline  print the comments that name them in the first line of a file, for any editor
---
exit status:
  0

examples:
  hmpx schema
  hmpx schema --vscode
  hmpx schema --modeline"""


def _schema(options: argparse.Namespace) -> int:
    """Prints the paths of the schemas, or a setting or comments that have them."""
    folder = Path(checking.__file__).parent / "schemas"
    files = sorted(folder.glob("*.json"))
    if options.modeline:
        return output.show(f"# yaml-language-server: $schema={each.as_uri()}" for each in files)
    if not options.vscode:
        return output.show(map(str, files))
    kinds = {kind: [f"{kind}.yaml", f"*.{kind}.yaml"] for kind in ("policy", "contract")}
    setting = {(folder / f"{kind}.json").as_uri(): names for kind, names in kinds.items()}
    return output.show(json.dumps({"yaml.schemas": setting}, indent=2).splitlines())


SCHEMA: Final = Command(_SCHEMA, _schema)


# --- ops --------------------------------------------------------------------------------------------

_OPS: Final = """\
show ops, their policy, and the line that decides
---
hmpx ops [list options] [--why] [PATTERN...]
       hmpx ops [list options] --engine NAME
       hmpx ops --formats
---
Prints each op that a list may name, its policy, the line that decides, and its call sites in
torch.
---
patterns PATTERN*  part of a name, a glob such as 'conv*', or any spelling: truediv, F.gelu, Tensor.add
--engine NAME  print the lists' settings for openvino, coreml, fsdp2, deepspeed or gaudi
--formats  list the number formats that may be the low type, instead of ops
--why  explain ops: the line that decides, possible overrides, how it computes here
list options
---
policies:
  LOW bf16  inputs are cast to bf16        FIRST  ... to the type of the first one
  FP32      ... to fp32                    -      nothing
  WIDEST    ... to the widest type among them
  FOLLOW    ... to fp32, unless all have one low type already
  Rows without an op's name are decisions of sections of the policy file.

exit status:
  0; 1 if a pattern matches no op; 2 wrong arguments or op lists

examples:
  hmpx ops softmax
  hmpx ops matmul softmax 'conv*'
  hmpx ops --why torch.nn.functional.gelu
  hmpx ops --fp32 my_fp32.txt 'conv*'
  hmpx ops --lists autocast-cuda --engine gaudi
  hmpx ops --formats"""


def _ops(options: argparse.Namespace) -> int:
    """Prints a row for each op, or for each number format; status 1 if no op matches."""
    if options.formats:
        return output.show(_format_lines())
    patterns: list[str] = options.patterns
    if options.why and not patterns:
        options.parser.error("--why explains an op: name one")
    loaded = output.with_warnings_shown(policy.load_policy, **list_options(options))
    if options.engine:
        return output.show(loaded.export(options.engine).text.splitlines())
    if options.why:
        return _explain(patterns, loaded)
    names = session.listable(loaded)
    found = {pattern: session.matching(pattern, names) for pattern in patterns}
    for pattern in (each for each, matching in found.items() if not matching):
        without = "; hmpx ops without a pattern shows all"
        output.complain(session.why_no_match(pattern, names, without))
    status = 0 if all(found.values()) else 1
    if patterns:
        names = list(dict.fromkeys(name for matching in found.values() for name in matching))
    if not names:
        return status
    titles = ("op", "policy", "reason", "call sites")
    return output.show(ReportTable.of(titles, _rows(names, loaded)).lines(sys.maxsize), status)


def _rows(names: list[str], loaded: policy.Policy) -> Iterator[tuple[str, str, str, str]]:
    by_section = loaded.section_rules()
    for name in names:
        decision = loaded[name]
        sites = ", ".join(session.call_sites(name))
        yield name, session.outcome(decision), decision.reason, sites
        for each in by_section.get(name, ()):
            yield "", session.outcome(each.decision), str(each), ""


def _explain(patterns: list[str], loaded: policy.Policy) -> int:
    lines: list[str] = []
    status = 0
    for pattern in patterns:
        try:
            found = session.explain(pattern, policy=loaded)
        except OptionError as error:
            output.complain(str(error))
            status = 1
        else:
            lines += ["", *str(found).splitlines()] if lines else str(found).splitlines()
    return output.show(lines, status)


def _format_lines() -> list[str]:
    titles = ("format", "bits", "largest", "epsilon", "smallest normal", "smallest")
    rows: list[tuple[str, ...]] = []
    for name in formats.names():
        known = formats.get(name)
        if isinstance(known, formats.Custom):
            rows.append((name, *"-----"))
            continue
        values = (known.max, known.epsilon, known.smallest_normal, known.smallest_subnormal)
        rows.append((name, f"{known.bits:g}", *[f"{value:.6g}" for value in values]))
    return ReportTable.of(titles, rows, numbers=titles[1:]).lines(sys.maxsize)


OPS: Final = Command(_OPS, _ops)
