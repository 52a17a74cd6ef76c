"""Paths that may be URLs of object stores: which are known, and what they need.

A path with "://" in it is a URL, never a local file or folder. fsspec opens it; the extras of this
package bring what it needs for a kind of store.
"""

import importlib.util
import re

# Scheme: (module that fsspec needs, extra of this package that brings it).
_NEEDS = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "hf": ("huggingface_hub", "hub"),
}


def is_url(path: str) -> bool:
    """Whether a path is a URL and not that of a local file or folder."""
    return "://" in path


def scheme_of(url: str) -> str:
    """The scheme of a URL: "s3" of "s3://bucket/key"; "" of a local path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)(?:::.*)?://", url)
    return found[1].lower() if found else ""


def problems(option: str, path: str) -> list[str]:
    """Why a URL cannot be used: an unknown scheme, a missing package; [] for a local path.

    `option`: how the path was given, for the message. Opens no connection.
    """
    if not is_url(path):
        return []
    import fsspec

    scheme, known = scheme_of(path), fsspec.available_protocols()
    if scheme not in known:
        return [
            f"{option}{path}: {scheme or 'this'} is no kind of store that is known: use a local "
            "path, or one such as s3://BUCKET/KEY, gs://BUCKET/KEY or hf://datasets/OWNER/NAME"
        ]
    if scheme == "file":
        return [f"{option}{path}: give a local path without file://"]
    module, extra = _NEEDS.get(scheme, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return [
            f"{option}{path} needs {module}, which is not installed: pip install 'llmx[{extra}]'"
        ]
    return []


def refusal(option: str, path: str, remedy: str = "") -> str:
    """Why a URL cannot be used where none is supported; "" for a local path."""
    if not is_url(path):
        return ""
    return f"{option}{path} is a URL, and this must be local: {remedy or 'name a local path'}"


def require_local(option: str, path: str, remedy: str = "") -> None:
    """Raises ValueError for a URL."""
    if text := refusal(option, path, remedy):
        raise ValueError(text)
