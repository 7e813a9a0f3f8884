"""Save and load checkpoints as lesson 10 teaches it: one rank writes, atomically; loading runs no code.

The lesson writes this code out itself. Copy this file and `course_lib.files` into a program of your own if
you like, and change the import of `files`: they need nothing else from the course.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..files import whole_file

WRAPPERS = ("module.", "_orig_mod.")  # what DDP and DataParallel, and torch.compile, put before each name
SHOWN = 4  # names in a message, followed by the number of further ones


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which file, why, and what to do."""


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, so that no reader ever finds half of one (lesson 10).

    In a process group, every rank calls it: rank 0 writes ``state``, and the others wait until it is done or
    has failed. Without a group, the caller writes. The data is written beside the target, forced to the disk,
    and renamed: a kill at any moment leaves either the old file or the new one, complete. If ``path`` is a
    symbolic link, the file that it points to is replaced.

    ``state`` is a dict of tensors, numbers, strings and containers of them, which `load_checkpoint` can read.
    For a wrapped model take ``ddp.module.state_dict()``.

    On all ranks, `CheckpointError` is raised if the file cannot be written (no folder, no permission, a full
    disk), and TypeError if `load_checkpoint` would refuse ``state``. The file is then unchanged.
    """
    group = dist.is_available() and dist.is_initialized()
    faults: list[Exception | None] = [None]
    if not group or dist.get_rank() == 0:
        faults = [_write(Path(os.path.realpath(path)), state)]
    if group:  # the other ranks wait here
        dist.broadcast_object_list(faults, src=0)
    if faults[0] is not None:
        raise faults[0]


def _write(path: Path, state: Mapping[str, Any]) -> Exception | None:
    """Write a checkpoint; return what went wrong, of a type that every rank can unpickle."""
    if not isinstance(state, Mapping):
        return TypeError(f"a checkpoint is a dict, as in {{'model': model.state_dict()}}; got {state!r:.60}")
    try:
        with whole_file(path, durable=True) as file:
            torch.save(dict(state), file)
            file.flush()
            if code := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
                raise TypeError(
                    f"it holds {_some(sorted(code))}, which load_checkpoint would refuse; "
                    "save tensors, numbers, strings, lists and dicts (of a model its state_dict())"
                )
    except Exception as error:
        system = error.__context__ if isinstance(error, RuntimeError) else error  # torch hides a full disk
        if not isinstance(system, OSError):
            return TypeError(f"this state cannot be saved: {_reason(error)}")
        before = "; the previous file is unchanged" if path.is_file() else ""
        return CheckpointError(f"the checkpoint {path} cannot be written: {_reason(system)}{before}")
    return None


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint as data: code in the file is never run (lesson 10).

    Every rank may read the file. Its tensors arrive on the CPU, whatever device they were saved from.

    `CheckpointError` is raised if the file is missing, truncated or damaged (all bytes are checked, which
    ``torch.load`` does not do), if it is no checkpoint, carries code, or holds something other than a dict.
    """
    path = Path(path)
    try:
        fault = _fault(path)
        state = {} if fault else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path.name!r} in {path.parent.absolute()}") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from None
    if not isinstance(state, dict):
        fault = f"holds a {type(state).__name__}, and a checkpoint is a dict"
    if fault:
        raise CheckpointError(f"{path} {fault}")
    return state


def _fault(path: Path) -> str:
    """Say what is wrong with a checkpoint, by its bytes alone; return an empty string if nothing is."""
    with open(path, "rb") as file:
        begins, size = file.read(16), os.fstat(file.fileno()).st_size
    if size == 0:
        return "is empty: its writer was stopped before the first byte"
    if not begins.startswith(b"PK\x03\x04"):  # torch writes zip files
        return f"is no checkpoint of PyTorch: it begins with {begins!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except zipfile.BadZipFile:
        return f"is cut short: its {size:,} bytes have no end; its writer was stopped, or a copy of it"
    if broken is not None:
        return f"is damaged: the bytes of {broken} are not those that were written"
    if code := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        return (
            f"is refused: it carries code, {_some(sorted(code))}. To load it would run that. "
            "Ask for a state_dict, which is tensors alone"
        )
    return ""


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint into a model, all of them or none (lesson 10).

    `weights` are a ``state_dict()``, as in ``load_checkpoint(path)["model"]``. The prefixes of wrappers
    (``module.`` of DDP and DataParallel, ``_orig_mod.`` of torch.compile) may be on either side, or on both;
    they are removed only if every name has them.

    If tensors are missing, unexpected or of another shape, a `CheckpointError` names them, and the model is
    unchanged.
    """
    own = model.state_dict()
    have, want = _bare(weights), _bare(own)
    faults = {
        "missing": [name for name in want if name not in have],
        "unexpected": [name for name in have if name not in want],
        "another shape": [
            f"{name} is {_shape(have[name])} in the checkpoint and {_shape(value)} here"
            for name, value in want.items()
            if name in have and _shape(have[name]) != _shape(value)
        ],
    }
    if any(faults.values()):
        named = "; ".join(f"{what}: {_some(names)}" for what, names in faults.items() if names)
        raise CheckpointError(f"the weights do not fit this {type(model).__name__}. {named}")
    model.load_state_dict({name: have[bare] for name, bare in zip(own, want, strict=True)})


def _bare(state: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the prefixes that wrappers put before all names."""
    bare = dict(state)
    while prefixes := [each for each in WRAPPERS if bare and all(name.startswith(each) for name in bare)]:
        bare = {name.removeprefix(prefixes[0]): value for name, value in bare.items()}
    return bare


def _shape(value: Any) -> str:
    return "×".join(map(str, getattr(value, "shape", ["no tensor"]))) or "one number"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _reason(error: BaseException) -> str:
    """Return the system's words for an error, or the first line of Python's."""
    return getattr(error, "strerror", None) or (str(error) or repr(error)).splitlines()[0]
