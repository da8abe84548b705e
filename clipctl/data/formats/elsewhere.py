"""Data that have to be downloaded or unpacked first, and the commands that do it. No torch."""

import re
import shlex
from pathlib import Path

from clipctl.errors import DataError

ARCHIVE_SUFFIXES = (
    *(".zip", ".7z", ".rar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst"),
    *(".gz", ".bz2", ".xz", ".zst"),
)
_UNPACKERS = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "zstd -d"}
# Settings hold absolute paths: an address may come after the working directory, and has lost a slash there.
_ADDRESS = re.compile(r"(?i)(?:^|/)(https?|ftp|hf|s3|gs|gcs|az|abfss?):/{1,2}(.*)")
_HUB_ADDRESS = re.compile(r"(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+(?:/[\w.-]+)?)")
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")


def check_is_local(text: str) -> None:
    """Raise DataError for an address such as https://…, hf://… or s3://…"""
    if address := _ADDRESS.search(text):
        scheme, rest = address[1].lower(), address[2]
        raise DataError(f"{scheme}://{rest} is not on this machine: download it first", _download(scheme, rest))


def hub_hint(text: str) -> str | None:
    """How to download the dataset, if this could be its name on the Hugging Face hub."""
    name = text.removeprefix(f"{Path.cwd().as_posix()}/")
    return f"for a dataset on the Hugging Face hub: {_hub_download(name)}" if _HUB_NAME.fullmatch(name) else None


def _download(scheme: str, rest: str) -> str:
    name = shlex.quote(re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")[2] or "data")
    address = shlex.quote(f"{scheme}://{rest}")
    if scheme == "hf":
        return _hub_download("/".join(rest.removeprefix("datasets/").split("@")[0].split("/")[:2]))
    if hub := _HUB_ADDRESS.match(rest):
        return _hub_download(hub[1])
    if scheme == "s3":
        return f"aws s3 cp --recursive {address} {name}"
    if scheme in ("gs", "gcs"):
        return f"gcloud storage cp -r {shlex.quote(f'gs://{rest}')} ."
    if scheme in ("http", "https", "ftp"):
        return f"curl -L -o {name} {address}"
    return "pass a file or directory on this machine"


def _hub_download(name: str) -> str:
    return f"hf download {shlex.quote(name)} --repo-type dataset --local-dir {shlex.quote(name.rpartition('/')[2])}"


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def archive_error(path: Path) -> DataError:
    """For an archive that is not read in place."""
    suffix = next(one for one in ARCHIVE_SUFFIXES if path.name.lower().endswith(one))
    target = path.with_name(path.name[: -len(suffix)])
    if suffix in _UNPACKERS:
        return DataError(
            f"{path} is compressed: unpack it and pass {target.name}", f"{_UNPACKERS[suffix]} {shlex.quote(str(path))}"
        )
    return DataError(f"{path} is an archive: unpack it and pass the directory", _unpack(path, target, suffix))


def _unpack(path: Path, target: Path, suffix: str) -> str:
    file, directory = shlex.quote(str(path)), shlex.quote(str(target))
    if suffix == ".zip":
        return f"unzip -q {file} -d {directory}"
    if suffix == ".7z":
        return f"7z x {file} -o{directory}"
    if suffix == ".rar":
        return f"unrar x {file} {directory}/"
    return f"mkdir {directory} && tar -xf {file} -C {directory}"
