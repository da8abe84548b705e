"""Datasets as their owners write them, with pictures that can be told apart."""

import io
import json
import struct
import tarfile
import zlib

import numpy as np
from PIL import Image


def pixels(number, width=48, height=36):
    """A picture whose colours say its number."""
    rng = np.random.default_rng(number)
    base = rng.integers(0, 256, size=(3, 4, 3), dtype=np.uint8)
    return Image.fromarray(base).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(number, **size):
    buffer = io.BytesIO()
    pixels(number, **size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def bomb(side):
    """A PNG that says it is side × side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def write_pictures(directory, names):
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(jpeg(number))


FLICKR8K_NAMES = ("1000268201_693b08cb0e.jpg", "1001773457_577c3a7d70.jpg", "1002674143_1b742ab4b8.jpg")


def flickr8k_kaggle(root):
    """captions.txt and Images/, as on Kaggle: a header, five rows a picture, commas quoted where they stand in text."""
    write_pictures(root / "Images", FLICKR8K_NAMES)
    lines = ["image,caption"]
    for name in FLICKR8K_NAMES:
        lines += [f"{name},A child in a pink dress is climbing up a set of stairs in an entry way ."]
        lines += [f'{name},"A dog , wet and happy , runs number {number} ."' for number in range(4)]
    (root / "captions.txt").write_text("\n".join(lines) + "\n")
    return root


def flickr8k_tokens(root):
    """Flickr8k.token.txt and Flicker8k_Dataset/, as the authors distribute them."""
    write_pictures(root / "Flicker8k_Dataset", FLICKR8K_NAMES)
    lines = [f"{name}#{number}\tA man {number} walks ." for name in FLICKR8K_NAMES for number in range(5)]
    (root / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    return root


def flickr30k_kaggle(root):
    """results.csv and flickr30k_images/flickr30k_images/, with the row that lacks its second pipe."""
    names = ("1000092795.jpg", "10002456.jpg", "2199200615.jpg")
    write_pictures(root / "flickr30k_images", names)
    lines = ["image_name| comment_number| comment"]
    for name in names:
        for number in range(5):
            lines.append(f"{name}| {number}| Two young guys with shaggy hair look at their hands {number} .")
    lines[-1] = "2199200615.jpg| 4   A dog runs across the grass ."
    (root / "results.csv").write_text("\n".join(lines) + "\n")
    return root


def coco(root):
    """annotations/captions_{train,val}2017.json beside train2017/ and val2017/."""
    number = 0
    for side, count in (("train", 4), ("val", 2)):
        images, annotations = [], []
        for _ in range(count):
            number += 1
            name = f"{number:012d}.jpg"
            write_pictures(root / f"{side}2017", [])
            (root / f"{side}2017" / name).write_bytes(jpeg(number))
            url = f"http://images.cocodataset.org/{side}2017/{name}"
            images.append({"license": 4, "file_name": name, "coco_url": url, "height": 36, "width": 48, "id": number})
            annotations += [
                {"image_id": number, "id": 10 * number + k, "caption": f"A bicycle {number} seen {k} times."}
                for k in range(5)
            ]
        document = {"info": {"year": 2017}, "licenses": [], "images": images, "annotations": annotations}
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"captions_{side}2017.json").write_text(json.dumps(document))
    return root


def karpathy(root):
    """dataset_coco.json: a folder in filepath, five sentences, sides train, restval, val and test."""
    images = []
    for number, side in enumerate(("train", "restval", "train", "val", "val", "test")):
        folder = "train2014" if side == "train" else "val2014"
        name = f"COCO_{folder}_{number:012d}.jpg"
        write_pictures(root / folder, [])
        (root / folder / name).write_bytes(jpeg(number))
        sentences = [
            {
                "tokens": ["a", "man"],
                "raw": f"A man {number} with a red helmet {k}.",
                "imgid": number,
                "sentid": 5 * number + k,
            }
            for k in range(5)
        ]
        images.append(
            {
                "filepath": folder,
                "sentids": [5 * number + k for k in range(5)],
                "filename": name,
                "imgid": number,
                "split": side,
                "sentences": sentences,
                "cocoid": number,
            }
        )
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return root


def blip(root):
    """coco_karpathy_train.json has a caption a row, coco_karpathy_val.json a list of them."""
    write_pictures(root, [f"val2014/COCO_val2014_{number:012d}.jpg" for number in range(4)])
    rows = [
        {"image": f"val2014/COCO_val2014_{number:012d}.jpg", "caption": [f"a woman {number} eats", f"lunch {number}"]}
        for number in range(3)
    ]
    rows.append({"image": "val2014/COCO_val2014_000000000003.jpg", "caption": "a single caption", "image_id": "coco_3"})
    path = root / "coco_karpathy_val.json"
    path.write_text(json.dumps(rows))
    return path


def diffusers(root):
    """metadata.jsonl beside the pictures, as diffusers' text-to-image examples want it."""
    write_pictures(root / "train", [f"{number:04d}.png" for number in range(4)])
    lines = [
        json.dumps({"file_name": f"{number:04d}.png", "text": f"a drawing of pokemon {number}"}) for number in range(4)
    ]
    (root / "train" / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return root


def imagefolder(root):
    """HF imagefolder with splits, each with its own metadata.csv."""
    for side, count in (("train", 4), ("validation", 2), ("test", 2)):
        names = [f"{side}_{number}.jpg" for number in range(count)]
        write_pictures(root / side, names)
        rows = ["file_name,text"] + [f"{name},a {side} picture of {name[:-4]}" for name in names]
        (root / side / "metadata.csv").write_text("\n".join(rows) + "\n")
    return root


def open_clip_csv(root):
    """Tabs, filepath and title, absolute paths: what open_clip's --train-data takes."""
    write_pictures(root / "photos", [f"{number}.jpg" for number in range(4)])
    lines = ["filepath\ttitle"] + [f"{root}/photos/{number}.jpg\ta photo, number {number}" for number in range(4)]
    path = root / "train.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_clip_csv(root):
    """image_path and caption, as transformers' run_clip.py wants it."""
    write_pictures(root / "images", [f"{number}.jpg" for number in range(4)])
    lines = ["image_path,caption"] + [f'images/{number}.jpg,"A cat, number {number}"' for number in range(4)]
    path = root / "dataset.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def sidecars(root):
    write_pictures(root, [f"{number:04d}.png" for number in range(4)])
    for number in range(4):
        (root / f"{number:04d}.txt").write_text(f"a castle, number {number}, masterpiece")
    return root


def classes(root):
    seed = 0
    for side, count in (("train", 3), ("val", 2)):
        for label in ("golden_retriever", "tabby-cat"):
            (root / side / label).mkdir(parents=True)
            for number in range(count):
                seed += 1
                (root / side / label / f"{number}.jpg").write_bytes(jpeg(seed))
    return root


def shard(path, samples):
    """A tar of (member name, bytes), as WebDataset's TarWriter and img2dataset write it."""
    with tarfile.open(path, "w") as tar:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def img2dataset(root, shards=2, pairs=4):
    """00000.tar with jpg, json and txt members, 00000_stats.json and 00000.parquet beside it."""
    root.mkdir(exist_ok=True)
    for number in range(shards):
        samples = []
        for row in range(pairs):
            key = f"{number:05d}{row:04d}"
            caption = f"an old photo of town {key}"
            facts = {"caption": caption, "url": f"http://example.org/{key}", "key": key, "status": "success"}
            samples += [
                (f"{key}.jpg", jpeg(10 * number + row)),
                (f"{key}.json", json.dumps(facts).encode()),
                (f"{key}.txt", caption.encode()),
            ]
        shard(root / f"{number:05d}.tar", samples)
        (root / f"{number:05d}_stats.json").write_text(json.dumps({"count": pairs, "successes": pairs}))
        (root / f"{number:05d}.parquet").write_bytes(b"PAR1")
    return root
