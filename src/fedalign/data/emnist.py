"""Reads the balanced split of EMNIST from the official archive, or from its four idx files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path

from fedalign.data.idx import parse_idx, read_idx_folder
from fedalign.data.source import Bytes, Source, Splits
from fedalign.errors import FedalignError


def read_emnist(source: Source, folder: Path) -> Splits:
    """Read EMNIST from ``gzip.zip`` in ``folder`` or, without that file, from four idx files."""
    archive = folder / "gzip.zip"
    if not archive.is_file():
        return read_idx_folder(folder, source)

    def read(part: str, kind: str, dimensions: int) -> Bytes:
        name = f"gzip/emnist-balanced-{part}-{kind}-idx{dimensions}-ubyte.gz"
        try:
            with zipfile.ZipFile(archive) as opened:
                return parse_idx(gzip.decompress(opened.read(name)), dimensions, archive / name)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, OSError) as error:
            raise FedalignError(f"{archive} is damaged ({error}); delete it and download it again") from error

    return Splits(
        read("train", "images", 3), read("train", "labels", 1), read("test", "images", 3), read("test", "labels", 1)
    )
