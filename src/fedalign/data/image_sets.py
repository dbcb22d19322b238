"""The three image data sets of the paper: their official files, download addresses and checksums."""

from __future__ import annotations

from fedalign.data.cifar10 import BATCHES, read_cifar10
from fedalign.data.emnist import read_emnist
from fedalign.data.idx import read_idx_folder
from fedalign.data.source import Remote, Source


def _mirrored(name: str, md5: str, *bases: str) -> Remote:
    return Remote(name, md5, tuple(base + name for base in bases))


_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
_IDX = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

SOURCES: dict[str, Source] = {
    "fmnist": Source(
        name="fmnist",
        title="Fashion-MNIST",
        folder="fashion-mnist",
        classes=10,
        counts=(60_000, 10_000),
        remotes=tuple(
            _mirrored(name, md5, *_FASHION)
            for name, md5 in zip(
                _IDX,
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
                strict=True,
            )
        ),
        read=lambda source, folder: read_idx_folder(folder, source),
        needed=(_IDX,),
        md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
    "emnist": Source(
        name="emnist",
        title="EMNIST (balanced)",
        folder="emnist",
        classes=47,
        counts=(112_800, 18_800),
        remotes=(
            _mirrored("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", "https://biometrics.nist.gov/cs_links/EMNIST/"),
        ),
        read=read_emnist,
        needed=(
            ("gzip.zip",),
            tuple(
                f"emnist-balanced-{part}-{kind}-ubyte.gz"
                for part in ("train", "test")
                for kind in ("images-idx3", "labels-idx1")
            ),
        ),
        transposed=True,
    ),
    "cifar10": Source(
        name="cifar10",
        title="CIFAR-10",
        folder="cifar-10",
        classes=10,
        counts=(50_000, 10_000),
        remotes=(
            _mirrored(
                "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "https://www.cs.toronto.edu/~kriz/"
            ),
        ),
        read=read_cifar10,
        needed=(
            ("cifar-10-binary.tar.gz",),
            ("cifar-10-python.tar.gz",),
            tuple(f"{batch}.bin" for batch in BATCHES),
            tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in BATCHES),
            BATCHES,
            tuple(f"cifar-10-batches-py/{batch}" for batch in BATCHES),
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        md5={
            "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
}
