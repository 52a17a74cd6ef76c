"""What stops a write or a read, and what to do."""

import errno
import re

# (Pattern in the error's text or name, cause, remedy). The first that matches counts.
_FULL = (
    (r"ENOSPC|No space left", "the disk is full", "free space on it"),
    (r"EDQUOT|[Qq]uota", "the disk quota is used up", "free space or raise the quota"),
    (r"EFBIG|File too large", "a file is larger than is allowed", "raise the limit (ulimit -f)"),
)
CAUSES = (
    *_FULL,
    (r"EROFS|Read-only", "the file system is read-only", "mount it for writing"),
    (r"EACCES|EPERM|[Pp]ermission", "access is not permitted", "permit it"),
    (r"ENOENT|No such file|NOT_FOUND", "a file or folder has vanished", "bring it back"),
    (r"ENOTDIR|EEXIST|Not a directory|File exists", "a file is in the way", "move it away"),
    (r"EISDIR|Is a directory", "a folder is in the way", "move it away"),
    (
        r"EMFILE|ENFILE|Too many open files",
        "too many files are open",
        "raise the limit (ulimit -n)",
    ),
    (r"EIO|ESTALE|Input/output", "the disk or network file system fails", "check it"),
)


def reason(error: BaseException) -> tuple[str, str]:
    """The cause of a failed write in words, with the error's text, and the remedy."""
    text = " ".join(str(error).split())
    for where in filter(None, (_name(error), text)):
        for pattern, cause, remedy in CAUSES:
            if re.search(pattern, where):
                return f"{cause} ({_shortened(text, re.search(pattern, text))})", remedy
    return f"{type(error).__name__}: {text[:300]}", "mend that"


def _name(error: object) -> str:
    """As "ENOSPC", "" for what is no error of the system."""
    return errno.errorcode.get(error.errno, "") if isinstance(error, OSError) else ""


def _shortened(text: str, found: re.Match | None) -> str:
    """The beginning of a text, which names the file, and what is around the match."""
    if found is None:
        return text[:300]
    head, begin, end = 160, found.start() - 60, found.end() + 80
    middle, tail = " ... " if begin > head else "", " ..." if max(head, end) < len(text) else ""
    return text[:head] + middle + text[max(head, begin) : end] + tail


def stated(error: object) -> str:
    """An error in words, with what to do where a disk is full."""
    if not any(re.match(pattern, _name(error)) for pattern, *_ in _FULL):
        return str(error)
    cause, remedy = reason(error)
    return f"{cause}: {remedy}, and run the same command again"
