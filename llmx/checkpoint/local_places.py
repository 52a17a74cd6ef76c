"""Where the local tier keeps its files, and by which addresses its processes reach each other."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from llmx.checkpoint import local_files, neighbors
from llmx.checkpoint.manifest import Corrupt

RUN = "run_id"  # in the folder of the checkpoints: files of an earlier run there are not taken


def private_folder(directory: str, workdir: str) -> Path:
    """The folder of this run in `directory`, by whatever path its work directory is named. Raises
    ValueError where it cannot be used."""
    where = workdir if "://" in workdir else os.path.realpath(workdir)
    digest = hashlib.sha256(where.encode()).hexdigest()[:16]
    root = Path(directory).expanduser().absolute() / f"llmx-{digest}"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        with open(root / ".writable", "w"):
            pass
        (root / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"checkpoint.local_directory={directory!r} cannot be written: {error}; name a folder "
            "on a disk of this host, or in /dev/shm, or '' for none"
        ) from error
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise ValueError(
            f"checkpoint.local_directory={directory!r}: {root} belongs to another user or is a "
            "link: remove it, or name another folder"
        )
    return root


def run_id(workdir: str) -> str:
    """A random text in the folder of the checkpoints, made by the first launch of the run."""
    from etils import epath

    path = epath.Path(workdir) / "checkpoints" / RUN
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{RUN}.tmp")
        temporary.write_text(secrets.token_hex(16))
        temporary.replace(path)
    return path.read_text().strip()


def elsewhere(root: Path, index: int, run: str) -> list[str]:
    """Which checkpoints of this run the folders of other work directories beside `root` hold: its
    work directory was named or placed otherwise, or copied."""
    found = []
    for folder in sorted(root.parent.glob(f"llmx-*/process-{index}")):
        steps = []
        for path in folder.glob("*.*.own") if folder.parent != root else ():
            with contextlib.suppress(OSError, Corrupt), open(path, "rb") as file:
                header = local_files.read_header(file)
                steps += [header.step] if header.run == run else []
        if steps:
            found.append(
                f"{max(steps)} in {folder.parent} is of the same run under another path of its "
                "work directory, and is not used: if that is wanted, end this run and rename that "
                f"folder to {root}"
            )
    return found


def boot_id() -> str:
    """What this host has alone, until it starts again."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


def address_of(places: list[dict], index: int) -> str:
    """Where process `index` listens: the address by which it reaches the others."""
    mine = places[index]
    for other in places:
        # Process 0 may reach itself by 127.0.0.1 only.
        if other["host"] != mine["host"] and not other["address"].startswith("127."):
            return neighbors.route(other["address"])
    return mine["address"]


def orphans(root: Path, index: int, places: list[dict]) -> list[Path]:
    """Folders of processes that are on other hosts now; one process of this host reads them."""
    mine = places[index]
    here = [
        k for k, p in enumerate(places) if (p["host"], p["disk"]) == (mine["host"], mine["disk"])
    ]
    if index != here[0]:
        return []
    taken = {f"process-{k}" for k in here}
    return [path for path in sorted(root.glob("process-*")) if path.name not in taken]
