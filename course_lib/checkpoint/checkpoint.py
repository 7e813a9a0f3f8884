"""Save and load checkpoints as lesson 10 teaches it: one rank writes, atomically; loading runs no code.

The lesson writes this code out itself. Copy this file and `course_lib.files` into a program of your own if
you like, and change the import of `files`: they need nothing else from the course.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import whole_file

if TYPE_CHECKING:
    import torch
    from torch import nn

WRAPPERS = ("module.", "_orig_mod.")  # what DDP and DataParallel, and torch.compile, put before each name
SHOWN = 4  # names in a message, followed by the number of further ones


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message says which file, why, and what to do."""


# --- save -------------------------------------------------------------------------------------------------


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, so that no reader ever finds half of one (lesson 10).

    With a process group every rank calls it: rank 0 writes ``state``, and the others wait until it is done
    or has failed. Without a group, the caller writes. The data is written beside the target, forced to the
    disk, and renamed: a kill at any moment leaves either the old file or the new one, complete.

    Parameters
    ----------
    path
        The file, in an existing folder. If it is a symbolic link, the file that it points to is replaced.
    state
        A dict of tensors, numbers, strings and containers of them, which `load_checkpoint` can read. For a
        wrapped model take ``ddp.module.state_dict()``.

    Raises
    ------
    CheckpointError
        The file cannot be written (no folder, no permission, a full disk): on every rank. It is unchanged.
    TypeError
        ``state`` is not a dict, or holds something that `load_checkpoint` would refuse; nothing is written.
    """
    import torch.distributed as dist

    fault: Exception | None = None
    group = dist.is_available() and dist.is_initialized()
    if not group or dist.get_rank() == 0:
        try:
            _write(Path(os.path.realpath(path)), state)
        except (CheckpointError, TypeError) as error:
            fault = error
        except Exception as error:  # other ranks could not unpickle every type
            fault = CheckpointError(f"the checkpoint {path} cannot be written: {error!r}")
    if group:  # the other ranks wait here
        told = [fault]
        dist.broadcast_object_list(told, src=0)
        fault = fault or told[0]
    if fault is not None:
        raise fault from None


def _write(path: Path, state: Mapping[str, Any]) -> None:
    import torch

    if not isinstance(state, Mapping):
        raise TypeError(f'a checkpoint is a dict, as in {{"model": model.state_dict()}}; got {state!r:.60}')
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give the name of a file in it")
    try:
        with whole_file(path, durable=True) as file:
            try:
                torch.save(dict(state), file)
            except Exception as error:
                if isinstance(error.__context__, OSError):  # the system's message, which torch's hides
                    raise error.__context__ from None
                raise TypeError(f"this state cannot be saved: {str(error).splitlines()[0]}") from None
            file.flush()
            if code := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
                raise TypeError(
                    f"this state holds {_some(sorted(code))}, which load_checkpoint would refuse: "
                    "save tensors, numbers, strings, lists and dicts (of a model its state_dict())"
                )
    except OSError as error:
        before = "; the previous file is unchanged" if path.exists() else ""
        why = error.strerror or error
        raise CheckpointError(f"the checkpoint {path} cannot be written: {why}{before}") from None


# --- load -------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint as data: code in the file is never run (lesson 10).

    Parameters
    ----------
    path
        The file; every rank may read it.
    map_location
        Where the tensors go, as in ``torch.load``; by default the CPU, whatever device they were saved from.

    Returns
    -------
    dict
        What was saved.

    Raises
    ------
    CheckpointError
        There is no such file; it is truncated or damaged (all bytes are checked, which ``torch.load`` does
        not do); it is not a checkpoint; it carries code; or it holds something other than a dict.
    """
    import torch

    path = Path(path)
    try:
        with open(path, "rb") as file:
            begins, size = file.read(16), os.fstat(file.fileno()).st_size
        _check_bytes(path, begins, size)
        state = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path.name!r} in {path.parent.absolute()}") from None
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_why(path, begins, error)) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, and a checkpoint is a dict")
    return state


def _check_bytes(path: Path, begins: bytes, size: int) -> None:
    """Raise `CheckpointError` for a file that its checksums show to be broken; torch writes zip files."""
    if size == 0:
        raise CheckpointError(f"{path} is empty: its writer was stopped before the first byte")
    if not begins.startswith(b"PK\x03\x04"):
        return  # from before torch 1.6, or no checkpoint: torch.load will tell
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{path} is cut short: its {size:,} bytes have no end; its writer was stopped, or a copy of it"
        ) from None
    if broken is not None:
        raise CheckpointError(f"{path} is damaged: the bytes of {broken} are not those that were written")


def _why(path: Path, begins: bytes, error: Exception) -> str:
    """Explain why a checkpoint cannot be loaded."""
    import torch

    code: Iterable[str] = ()
    with contextlib.suppress(Exception):
        code = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if code:
        return (
            f"{path} is refused: it carries code, {_some(sorted(code))}. To load it would run that. "
            "Ask for a state_dict, which is tensors alone"
        )
    if "TorchScript" in reason:
        return f"{path} is a TorchScript program, code and all, and no checkpoint: ask for a state_dict"
    if "deserialize object on" in str(error):
        return f"{path} was saved on a device missing here: leave map_location out, it is 'cpu' then"
    if not begins.startswith(b"PK"):
        return f"{path} is no checkpoint of PyTorch: it begins with {begins!r}"
    return f"{path} cannot be read as a checkpoint: {reason}"


# --- use --------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint into a model, all of them or none (lesson 10).

    The prefixes of wrappers (DDP's and DataParallel's ``module.``, torch.compile's ``_orig_mod.``) may be on
    either side, or on both. They are removed only from the front of a name, and only if every name has them:
    a layer called ``submodule`` keeps its name.

    Parameters
    ----------
    model
        Plain or wrapped, on any device.
    weights
        A ``state_dict()``, as in ``load_checkpoint(path)["model"]``.

    Raises
    ------
    CheckpointError
        Tensors are missing, unexpected or of another shape; the message names them. The model is unchanged.
    """
    import torch

    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"these are not weights: {_some(others)} {'is' if len(others) == 1 else 'are'} not a tensor. "
            'Is it a whole checkpoint? Then take its part, as in checkpoint["model"]'
        )
    own = model.state_dict()
    have, want = _bare(weights), _bare(own)
    faults = []
    if missing := [want[name] for name in want if name not in have]:
        faults.append(f"missing: {_some(missing)}")
    if unexpected := [have[name] for name in have if name not in want]:
        faults.append(f"unexpected: {_some(unexpected)}")
    shapes = [
        f"{want[name]} is {_shape(weights[have[name]])} in the checkpoint and {_shape(own[want[name]])} here"
        for name in want
        if name in have and weights[have[name]].shape != own[want[name]].shape
    ]
    if shapes:
        faults.append(f"another shape: {_some(shapes)}")
    if faults:
        raise CheckpointError(f"the weights do not fit this {type(model).__name__}. " + "; ".join(faults))
    model.load_state_dict({want[name]: weights[have[name]] for name in want})


def _bare(names: Iterable[str]) -> dict[str, str]:
    """Map each name, without the prefixes that wrappers put before all of them, to the full name."""
    full = list(names)
    bare = full
    while prefixes := [w for w in WRAPPERS if bare and all(name.startswith(w) for name in bare)]:
        bare = [name.removeprefix(prefixes[0]) for name in bare]
    return dict(zip(bare, full, strict=True))


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
