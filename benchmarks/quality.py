"""What a model finds after a given time on real data: clipctl's recipes against open_clip's and transformers'.

    python benchmarks/quality.py --data icons=ICONS/train.csv,ICONS/val.csv,ICONS/unseen.csv --seconds 600 --seeds 3

Each contender trains in a process of its own, one after the other, for the same time on the same pictures. The score is
the mean of both recalls at 1 on the second table, of the last weights: nothing is selected on it. clipctl runs with
several seeds, the others with one. The third table, if there is one, holds captions that never occur in training.

    --contenders auto clip plain open_clip transformers      (default: all)
    --recipe 'small=--set model.image.size_px=24'            another contender: clipctl with these flags
    --out results.jsonl      one line per run: read again by --table, so that a study can be made in parts
    --plot recall.png        recall over seconds
    --table                  only print what --out holds

The peers train their own model with their own loss and recipe, in the shape of the preset `tiny`: open_clip with AdamW
(5e-4, 0.9, 0.98, weight decay 0.2), crops of 90 to 100% and batches of 256; transformers with the defaults of its
Trainer (AdamW, 5e-5, falling linearly) and batches of 64. Both need `pip install transformers`, `pip install --no-deps
open_clip_torch` and `pip install ftfy regex`. torchvision is not needed: pictures are cropped here.
"""

import argparse
import csv
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

RECIPES = {
    "auto": [],
    "clip": ["--layout", "clip"],
    "plain": ["--recipe", "plain"],
}
PEERS = ("open_clip", "transformers")
SIZE_PX, PATCH_PX, WIDTH, IMAGE_DEPTH, TEXT_DEPTH, HEADS = 64, 8, 128, 4, 2, 4  # the preset `tiny`
CONTEXT = 32
EVALUATIONS = 10


def pairs_of(table):
    with open(table, newline="", encoding="utf-8") as file:
        return [(Path(table).parent / row["filepath"], row["caption"]) for row in csv.DictReader(file)]


def recall(images, texts, captions):
    """Mean of both recalls at 1, of unit vectors; any picture with the same caption is right."""
    similarity, names = images @ texts.T, np.array(captions)
    right = torch.from_numpy(names[:, None] == names)
    rows = torch.arange(len(names))
    return (
        float(right[rows, similarity.argmax(1)].float().mean() + right[similarity.argmax(0), rows].float().mean()) / 2
    )


# --- clipctl ---------------------------------------------------------------------------------------------------


def run_clipctl(name, tables, seconds, seed):
    import clipctl

    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "clipctl", "train", tables[0], "--val", tables[1], "--json"]
        command += ["--time", f"{seconds}s", "--seed", str(seed), "--runs-dir", runs, *RECIPES[name]]
        command += ["--set", "data.val_limit=10000"]  # as many as the peers are judged on
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        taken_s = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(done.stderr)
        summary = json.loads(done.stdout)
        lines = (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        start_s = taken_s - summary["seconds"]
        curve = [(start_s + row["elapsed_s"], row["score"]) for row in rows if row["kind"] == "eval"]
        result = {"score": (summary["i2t_r1"] + summary["t2i_r1"]) / 2, "curve": curve, "seconds": taken_s}
        result |= {"parameters": summary["parameters"], "epochs": summary["epochs"], "baseline": summary["baseline_r1"]}
        if len(tables) > 2:
            model, pairs = clipctl.load(f"{summary['run']}@last"), pairs_of(tables[2])
            captions = [caption for _, caption in pairs]
            images = torch.from_numpy(np.asarray(model.embed_images([str(path) for path, _ in pairs])))
            result["unseen"] = recall(images, torch.from_numpy(np.asarray(model.embed_texts(captions))), captions)
    return result


# --- peers -----------------------------------------------------------------------------------------------------


def pixels_of(pairs):
    """(N, 3, 64, 64) bytes."""
    found = []
    for path, _ in pairs:
        with Image.open(path) as picture:
            found.append(np.asarray(picture.convert("RGB").resize((SIZE_PX, SIZE_PX), Image.Resampling.BICUBIC)))
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()


def normalised(pixels):
    from clipctl.config.sections import OPENAI_MEAN, OPENAI_STD

    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    return (pixels.float() / 255 - mean) / std


def cropped(pixels, least_share):
    """A random crop of each picture, between `least_share` and all of its area, at full size again."""
    count = len(pixels)
    side = torch.sqrt(least_share + (1 - least_share) * torch.rand(count))
    shift = (1 - side).unsqueeze(1) * (2 * torch.rand(count, 2) - 1)
    maps = torch.zeros(count, 2, 3)
    maps[:, 0, 0] = maps[:, 1, 1] = side
    maps[:, :, 2] = shift
    grid = F.affine_grid(maps, [count, 3, SIZE_PX, SIZE_PX], align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


class OpenClip:
    batch_size, lr, betas, eps, weight_decay, warmup = 256, 5e-4, (0.9, 0.98), 1e-6, 0.2, 0.1

    def __init__(self, captions):
        import transformers  # before the placeholders below: it looks for torchvision as well

        assert transformers.__version__
        names = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
        with mock.patch.dict(sys.modules, {f"torchvision{name}": mock.MagicMock() for name in names}):
            import open_clip
        vision = {"image_size": SIZE_PX, "patch_size": PATCH_PX, "width": WIDTH, "layers": IMAGE_DEPTH}
        text = {"context_length": CONTEXT, "vocab_size": 49408, "width": WIDTH, "heads": HEADS, "layers": TEXT_DEPTH}
        self.model = open_clip.CLIP(WIDTH, {**vision, "head_width": WIDTH // HEADS}, text)
        self._loss, self._tokenizer = open_clip.ClipLoss(), open_clip.SimpleTokenizer(context_length=CONTEXT)
        self.parameters = list(self.model.parameters())

    def tokens(self, captions):
        return self._tokenizer(captions)

    def loss(self, images, tokens):
        image, text, scale = self.model(cropped(images, 0.9), tokens)
        return self._loss(image, text, scale)

    def share(self, progress):
        """Of the peak learning rate: warm-up, then half a cosine."""
        if progress < self.warmup:
            return progress / self.warmup
        return (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup))) / 2

    def embed(self, images, tokens):
        return self.model.encode_image(images, normalize=True), self.model.encode_text(tokens, normalize=True)

    def clamp(self):
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))


class Transformers(OpenClip):
    batch_size, lr, betas, eps, weight_decay = 64, 5e-5, (0.9, 0.999), 1e-8, 0.0

    def __init__(self, captions):
        from transformers import CLIPConfig, CLIPModel

        from clipctl.data.tokenizers import WordTokenizer

        self._tokenizer = WordTokenizer.learn(captions, 16_384, CONTEXT)
        shared = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": HEADS}
        vision = {**shared, "num_hidden_layers": IMAGE_DEPTH, "image_size": SIZE_PX, "patch_size": PATCH_PX}
        ids = {"eos_token_id": self._tokenizer.end_id, "bos_token_id": 1, "pad_token_id": 0}
        text = {**shared, **ids, "num_hidden_layers": TEXT_DEPTH, "max_position_embeddings": CONTEXT}
        text["vocab_size"] = self._tokenizer.vocab_size
        self.model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=WIDTH))
        self.parameters = list(self.model.parameters())

    def tokens(self, captions):
        return torch.from_numpy(np.stack([self._tokenizer.encode(caption) for caption in captions]))

    def loss(self, images, tokens):
        return self.model(pixel_values=images, input_ids=tokens, return_loss=True).loss

    def share(self, progress):
        return 1 - progress

    def embed(self, images, tokens):
        both = self.model(pixel_values=images, input_ids=tokens)
        return both.image_embeds, both.text_embeds

    def clamp(self):
        pass


def run_peer(name, tables, seconds, seed):
    """For so many seconds from here, evaluations not counted."""
    torch.manual_seed(seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sides = [pairs_of(table) for table in tables]
    images = [pixels_of(pairs) for pairs in sides]
    captions = [[caption for _, caption in pairs] for pairs in sides]
    peer = (OpenClip if name == "open_clip" else Transformers)(captions[0])
    tokens = [peer.tokens(side) for side in captions]
    decayed = [one for one in peer.parameters if one.ndim >= 2]
    others = [one for one in peer.parameters if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": peer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peer.lr, betas=peer.betas, eps=peer.eps)

    @torch.no_grad()
    def score(side):
        peer.model.eval()
        parts = [
            peer.embed(normalised(images[side][start : start + 256]), tokens[side][start : start + 256])
            for start in range(0, len(images[side]), 256)
        ]
        peer.model.train()
        return recall(*(torch.cat(column) for column in zip(*parts, strict=True)), captions[side])

    curve, started, evaluating, epochs = [], time.perf_counter(), 0.0, 0
    while (progress := (time.perf_counter() - started - evaluating) / seconds) < 1:
        for batch in torch.randperm(len(images[0])).split(peer.batch_size):
            progress = (time.perf_counter() - started - evaluating) / seconds
            if progress >= 1 or len(batch) < 2:
                break
            for group in optimizer.param_groups:
                group["lr"] = peer.lr * peer.share(progress)
            optimizer.zero_grad(set_to_none=True)
            peer.loss(normalised(images[0][batch]), tokens[0][batch]).backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters, 1.0)
            optimizer.step()
            peer.clamp()
        epochs += 1
        if progress * EVALUATIONS >= len(curve) + 1:
            before = time.perf_counter()
            curve.append((before - started - evaluating, score(1)))
            evaluating += time.perf_counter() - before
    result = {"score": score(1), "curve": [*curve, (seconds, score(1))], "seconds": seconds, "epochs": epochs}
    result["parameters"] = sum(one.numel() for one in peer.parameters)
    return {**result, **({"unseen": score(2)} if len(tables) > 2 else {})}


# --- the study -------------------------------------------------------------------------------------------------


def table_of(results):
    lines = [
        "| data | contender | runs | R@1 | unseen captions | parameters | epochs | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    grouped = defaultdict(list)
    for one in results:
        grouped[one["data"], one["contender"], one["asked_s"]].append(one)
    for (data, contender, asked_s), runs in grouped.items():
        scores = [100 * one["score"] for one in runs]
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(runs) > 1 else ""
        unseen = [100 * one["unseen"] for one in runs if "unseen" in one]
        lines.append(
            f"| {data} | {contender} | {len(runs)} | {statistics.mean(scores):.1f}%{spread} | "
            f"{f'{statistics.mean(unseen):.1f}%' if unseen else '–'} | {runs[0]['parameters']:,} | "
            f"{statistics.mean(one['epochs'] for one in runs):.0f} | "
            f"{statistics.mean(one['seconds'] for one in runs):.0f} of {asked_s:g} |"
        )
        if contender == "auto" and runs[0].get("baseline") is not None:
            baseline = f"{100 * runs[0]['baseline']:.1f}%"
            lines.append(f"| {data} | nearest pixels, picture to caption | – | {baseline} | – | – | – | – |")
    return "\n".join(lines)


def plot(results, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one["data"] for one in results))
    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4), squeeze=False)
    contenders = list(dict.fromkeys(one["contender"] for one in results))
    for axis, data in zip(axes[0], names, strict=True):
        for one in (one for one in results if one["data"] == data):
            label = one["contender"] if one["seed"] == 0 else None
            seconds, scores = zip(*one["curve"], strict=True)
            colour = f"C{contenders.index(one['contender'])}"
            axis.plot(seconds, [100 * score for score in scores], label=label, color=colour)
        baselines = [one["baseline"] for one in results if one["data"] == data and one.get("baseline") is not None]
        if baselines:
            axis.axhline(100 * baselines[0], linestyle=":", color="grey", label="nearest pixels, no training")
        axis.set(title=data, xlabel="seconds", ylabel="R@1, mean of both directions (%)", ylim=(0, None))
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=TRAIN,VAL[,UNSEEN]")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--contenders", nargs="*", choices=[*RECIPES, *PEERS])
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    own = {name: shlex.split(flags) for name, _, flags in (text.partition("=") for text in asked.recipe)}
    contenders = [*([*RECIPES, *PEERS] if asked.contenders is None else asked.contenders), *own]
    RECIPES.update(own)
    results = (
        [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out and asked.out.exists() else []
    )
    for text in [] if asked.table else asked.data:
        data, _, tables = text.partition("=")
        for contender in contenders:
            for seed in range(asked.seeds if contender in RECIPES else 1):
                run = run_clipctl if contender in RECIPES else run_peer
                result = run(contender, tables.split(","), asked.seconds, seed)
                results.append({"data": data, "contender": contender, "seed": seed, "asked_s": asked.seconds, **result})
                print(f"{data} {contender} {seed}: {100 * result['score']:.1f}%", file=sys.stderr, flush=True)
                if asked.out:
                    with asked.out.open("a") as file:
                        file.write(json.dumps(results[-1]) + "\n")
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}\n"
    )
    print(table_of(results))
    if asked.plot:
        plot(results, asked.plot)


if __name__ == "__main__":
    main()
