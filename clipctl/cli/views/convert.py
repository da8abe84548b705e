"""Displays what was imported or exported, and the proof that it computes the same."""

from typing import Any

from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views import units

CLOSE = 1e-4  # logits that differ by less are the same
LOST_POINTS = 2.0  # of R@1: more than rounding should cost


def imported_text(facts: dict[str, Any]) -> Text:
    lines = [
        f"{units.count(facts['parameters'])} parameters: image {facts['image']}, text {facts['text']}, "
        f"{facts['activation']}",
        f"saved in {facts['path']}",
        "",
        f"  clipctl search photos 'a red boat' --model {facts['path']}",
        f"  clipctl train photos --from {facts['path']}",
    ]
    return plain("\n".join(lines))


def merged_text(document: dict[str, Any]) -> Text:
    lines = []
    scored = [row for row in document["results"] if "score" in row]
    if scored:
        rows = [("alpha", "R@1", "picture to caption", "caption to picture", "")]
        for row in scored:
            alpha = "average" if row["alpha"] is None else f"{row['alpha']:g}"
            ends = {0.0: document["models"][0], 1.0: document["models"][-1]}.get(row["alpha"], "")
            shares = (f"{100 * row[key]:.1f}%" for key in ("score", "i2t_r1", "t2i_r1"))
            mark = "best" if row["alpha"] == document["alpha"] and len(scored) > 1 else ""
            rows.append((alpha, *shares, " ".join(filter(None, (mark, ends)))))  # type: ignore[arg-type]
        lines += [plain(f"{' and '.join(document['models'][:3])} on {document['data']}:"), aligned(rows)]
    if len(scored) > 1:
        lines.append(plain("the best was chosen on these pictures: evaluate it on others"))
    if document["path"]:
        lines.append(plain(f"saved in {document['path']}"))
    return Text("\n").join(lines)


def exported_text(document: dict[str, Any]) -> Text:
    first = plain(f"{document['model']} written to {document['path']} ({units.size(document['size_bytes'])})")
    rows = [("compared with", "image", "text", "logits", "")]
    for proof in document["proofs"]:
        if proof["missing"]:
            rows.append((proof["library"], "–", "–", "–", f"not compared: {proof['missing']}"))
        else:
            differences = (f"{proof[key]:.1e}" for key in ("image", "text", "logits"))
            verdict = "the same" if proof["logits"] <= CLOSE else "NOT the same"
            if proof["library"].endswith("int8"):
                verdict = "quantised"
            rows.append((f"{proof['library']} {proof['version']}", *differences, verdict))  # type: ignore[arg-type]
    parts = [first]
    if len(rows) > 1:
        parts += [plain("largest differences, on picture files and captions:"), aligned(rows)]
    if document.get("precisions"):
        parts += [plain(f"on {document['judged_on']}:"), *precision_lines(document["precisions"])]
    return Text("\n").join(parts)


def precision_lines(precisions: list[dict[str, Any]]) -> list[Text]:
    """Size, speed and recall of the full weights and of the 8-bit ones."""
    rows = [("weights", "size", "pictures/s", "R@1 picture to caption", "caption to picture", "")]
    for one in precisions:
        recalls = (f"{100 * one[key]:.1f}%" for key in ("i2t_r1", "t2i_r1"))
        rows.append((one["name"], units.size(one["size_bytes"]), f"{one['images_per_s']:,.0f}", *recalls, ""))
    full, rounded = precisions
    lost = 50 * sum(full[key] - rounded[key] for key in ("i2t_r1", "t2i_r1"))
    size, speed = (rounded[key] / full[key] for key in ("size_bytes", "images_per_s"))
    words = f"{size:.0%} of the size, {speed:.1f} × the speed, {round(-lost, 1) + 0.0:+.1f} points of R@1"
    style = "yellow" if lost > LOST_POINTS else ""
    return [aligned(rows), plain(words, style=style)]
