import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clipctl.config.layers import Layer, resolve
from clipctl.config.presets import PRESETS
from clipctl.config.sections import ImageTowerConfig, ModelConfig, TextTowerConfig
from clipctl.model import cost
from clipctl.model.clip import Clip
from clipctl.model.loss import Embeddings, batch_accuracy, sigmoid_loss, softmax_loss
from clipctl.model.towers import Block, take
from clipctl.model.workload import Workload

SMALL = ModelConfig(
    image=ImageTowerConfig(size_px=16, patch_px=8, width=32, depth=2, heads=4),
    text=TextTowerConfig(context=12, vocab_size=20, width=24, depth=2, heads=3),
    embed_dim=16,
)


def captions(count=3, tokens=12, end=19):
    ids = torch.randint(3, end, (count, tokens), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(range(5, 5 + count)):
        ids[row, length] = end
        ids[row, length + 1 :] = 0
    return ids


def unit(rows, seed):
    vectors = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=-1)


# --- size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_arithmetic_equals_the_built_model(preset):
    model = resolve([Layer("--preset", {"preset": preset})]).model
    model = replace(model, text=replace(model.text, vocab_size=model.text.vocab_size or cost.ASSUMED_VOCAB_SIZE))
    with torch.device("meta"):
        built = Clip(model)
    assert cost.parameters(model) == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("tiny", (1, 3)),
        ("small", (75, 79)),
        ("base", (103, 107)),
        ("medium", (147, 153)),
        ("large", (420, 435)),
        ("huge", (950, 1010)),
    ],
)
def test_presets_have_the_size_they_are_said_to_have(preset, millions):
    count = cost.parameters(resolve([Layer("--preset", {"preset": preset})]).model) / 1e6
    assert millions[0] <= count <= millions[1]


def test_flops_are_those_torch_counts():
    model = Clip(SMALL)
    # Its counter does not know the CPU's fused attention, so let it see the products that make it up.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 16, 16), captions(1))
    one = Workload(SMALL, 1, SMALL.text.context)
    both = cost.image_work(one) + cost.text_work(one)
    assert 3 * counter.get_total_flops() == both.flops


# --- towers ---------------------------------------------------------------------------------------------------


def test_embeddings_are_unit_vectors_and_the_scale_starts_at_the_papers():
    embeddings = Clip(SMALL)(torch.randn(3, 3, 16, 16), captions())
    assert embeddings.image.shape == embeddings.text.shape == (3, 16)
    torch.testing.assert_close(embeddings.image.norm(dim=-1), torch.ones(3))
    assert embeddings.scale.item() == pytest.approx(1 / 0.07)


def test_padding_behind_the_end_and_its_length_have_no_effect():
    model, ids = Clip(SMALL), captions()
    noisy = ids.clone()
    noisy[0, 6:] = 7
    torch.testing.assert_close(model.encode_text(ids), model.encode_text(noisy))
    torch.testing.assert_close(model.encode_text(ids), model.encode_text(ids[:, :9]))


def test_the_text_tower_reads_in_one_direction():
    """A change behind a position never changes what was computed before it."""
    tower, ids = Clip(SMALL).text, captions()
    changed = ids.clone()
    changed[:, 4] = 5
    x, y = (tower.tokens(t) + tower.positions for t in (ids, changed))
    for block in tower.blocks:
        x, y = block(x, causal=True), block(y, causal=True)
    torch.testing.assert_close(x[:, :4], y[:, :4])
    assert not torch.allclose(x[:, 4:], y[:, 4:])


def test_the_scale_is_capped_at_100():
    model = Clip(SMALL)
    torch.nn.init.constant_(model.log_scale, 9.0)
    model.clamp_scale()
    assert model.log_scale.exp().item() == pytest.approx(100)


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_weights_move_to_transformers_by_renaming(activation):
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    model = Clip(replace(SMALL, activation=activation)).eval()
    shared = {"hidden_act": activation, "projection_dim": 16, "layer_norm_eps": 1e-5}
    theirs = CLIPModel(
        CLIPConfig(
            vision_config={
                "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 16, "patch_size": 8, **shared,
            },
            text_config={
                "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
                "max_position_embeddings": 12, "vocab_size": 20, "eos_token_id": 19, "bos_token_id": 1,
                "pad_token_id": 0, **shared,
            },
            projection_dim=16,
        )
    ).eval()  # fmt: skip
    missing, unexpected = theirs.load_state_dict(transformers_names(model), strict=False)
    assert not unexpected and not [name for name in missing if "position_ids" not in name]
    images, ids = torch.randn(3, 3, 16, 16), captions()
    with torch.no_grad():
        ours, output = model(images, ids), theirs(pixel_values=images, input_ids=ids)
    torch.testing.assert_close(ours.image, output.image_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.text, output.text_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.scale * ours.image @ ours.text.T, output.logits_per_image, atol=1e-4, rtol=1e-4)


def transformers_names(model):
    """Our names to theirs: nothing but new names and the QKV matrix cut in three."""
    names = {
        "image.patches.weight": "vision_model.embeddings.patch_embedding.weight",
        "image.class_embedding": "vision_model.embeddings.class_embedding",
        "image.positions": "vision_model.embeddings.position_embedding.weight",
        "image.norm_pre": "vision_model.pre_layrnorm",
        "image.norm_post": "vision_model.post_layernorm",
        "image.projection": "visual_projection",
        "image.blocks": "vision_model.encoder.layers",
        "text.tokens": "text_model.embeddings.token_embedding",
        "text.positions": "text_model.embeddings.position_embedding.weight",
        "text.norm_final": "text_model.final_layer_norm",
        "text.projection": "text_projection",
        "text.blocks": "text_model.encoder.layers",
        "log_scale": "logit_scale",
        ".attention.out.": ".self_attn.out_proj.",
        ".norm_1.": ".layer_norm1.",
        ".norm_2.": ".layer_norm2.",
        ".mlp_in.": ".mlp.fc1.",
        ".mlp_out.": ".mlp.fc2.",
    }
    renamed = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if ".attention.qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                renamed[name.replace(".attention.qkv.", f".self_attn.{part}_proj.")] = piece
        else:
            renamed[name] = tensor
    return renamed


# --- losses ---------------------------------------------------------------------------------------------------


def test_softmax_loss_is_ln_b_when_nothing_is_known():
    same = torch.nn.functional.normalize(torch.ones(6, 8), dim=-1)
    assert softmax_loss(Embeddings(same, same, torch.tensor(10.0))).item() == pytest.approx(math.log(6))


def test_softmax_loss_written_out():
    image, text, scale = unit(4, 0), unit(4, 1), 5.0
    logits = scale * image @ text.T
    by_hand = 0.0
    for i in range(4):
        by_hand -= math.log(math.exp(logits[i, i]) / sum(math.exp(logits[i, j]) for j in range(4)))
        by_hand -= math.log(math.exp(logits[i, i]) / sum(math.exp(logits[j, i]) for j in range(4)))
    assert softmax_loss(Embeddings(image, text, torch.tensor(scale))).item() == pytest.approx(by_hand / 8, rel=1e-5)


def test_sigmoid_loss_written_out():
    image, text, scale, bias = unit(3, 0), unit(3, 1), 4.0, -2.0
    by_hand = 0.0
    for i in range(3):
        for j in range(3):
            logit = scale * float(image[i] @ text[j]) + bias
            by_hand += math.log(1 + math.exp(-logit if i == j else logit))
    embeddings = Embeddings(image, text, torch.tensor(scale), torch.tensor(bias))
    assert sigmoid_loss(embeddings).item() == pytest.approx(by_hand / 3, rel=1e-5)


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_losses_do_not_depend_on_the_order_of_pairs(loss):
    image, text, order = unit(5, 0), unit(5, 1), torch.tensor([3, 0, 4, 1, 2])
    scale, bias = torch.tensor(3.0), torch.tensor(-1.0)
    plain = loss(Embeddings(image, text, scale, bias))
    torch.testing.assert_close(plain, loss(Embeddings(image[order], text[order], scale, bias)))


def test_batch_accuracy_counts_both_directions():
    image = torch.eye(3)
    text = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0.5]])  # the third text prefers the second image
    assert batch_accuracy(Embeddings(image, text, torch.tensor(1.0))).item() == pytest.approx(5 / 6)


# --- the shortcut of the last block ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_block_gives_the_same_at_one_token_as_at_all(causal):
    """Values and every gradient."""
    torch.manual_seed(0)
    x = torch.randn(3, 7, 32, requires_grad=True)
    position = torch.tensor([0, 6, 3])
    block = Block(32, heads=4, activation="gelu")
    results = [take(block(x, causal=causal), position), block.at(x, position, causal=causal)]
    torch.testing.assert_close(results[0], results[1])
    inputs = [x, *block.parameters()]
    whole, short = (torch.autograd.grad(result.square().sum(), inputs) for result in results)
    for expected, actual in zip(whole, short, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_plain_attention_gives_what_the_fused_kernel_gives(monkeypatch):
    """Both towers, all tokens and one, forward and backward."""
    config = ModelConfig(
        image=ImageTowerConfig(size_px=16, patch_px=4, width=32, depth=3, heads=4),
        text=TextTowerConfig(vocab_size=30, context=9, width=32, depth=3, heads=4),
        embed_dim=16,
    )
    torch.manual_seed(0)
    model, images = Clip(config), torch.randn(5, 3, 16, 16)
    tokens = torch.randint(1, 29, (5, 9))
    tokens[torch.arange(5), torch.tensor([3, 8, 5, 2, 6])] = 29

    def gradients(way):
        model.use_attention(way)
        model.zero_grad()
        loss = softmax_loss(model(images, tokens))
        loss.backward()
        return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters()}

    (fused_loss, fused), (plain_loss, plain) = gradients("fused"), gradients("plain")
    assert plain_loss == pytest.approx(fused_loss, rel=1e-6)
    for name, gradient in fused.items():
        assert torch.norm(plain[name] - gradient) <= 1e-5 * torch.norm(gradient), name
    calls = []
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", lambda q, *_, **__: calls.append(1) or q)
    for way, count in (("plain", 0), ("fused", 6)):
        model.use_attention(way)
        model(images, tokens)
        assert len(calls) == count


def test_losses_with_several_right_answers_by_hand():
    """Images 0 and 1 share a caption. Not symmetric: text 1 is right for image 2 as well."""
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(3, 4), dim=1) for _ in range(2))
    embeddings = Embeddings(image, text, torch.tensor(3.0), torch.tensor(-1.0))
    right = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    logits = 3 * image @ text.T
    rows, columns = logits.log_softmax(dim=1), logits.log_softmax(dim=0)
    forward = -(rows[0, :2].mean() + rows[1, :2].mean() + rows[2, 1:].mean()) / 3
    backward = -(columns[:2, 0].mean() + columns[:, 1].mean() + columns[2:, 2].mean()) / 3
    assert softmax_loss(embeddings, right).item() == pytest.approx(((forward + backward) / 2).item(), abs=1e-6)
    signs = torch.where(right, 1.0, -1.0)
    expected = -torch.nn.functional.logsigmoid(signs * (logits - 1)).sum() / 3
    assert sigmoid_loss(embeddings, right).item() == pytest.approx(expected.item(), abs=1e-6)
    own = torch.eye(3, dtype=torch.bool)
    assert softmax_loss(embeddings, own).item() == pytest.approx(softmax_loss(embeddings).item(), abs=1e-6)
    assert sigmoid_loss(embeddings, own).item() == pytest.approx(sigmoid_loss(embeddings).item(), abs=1e-6)


def test_accuracy_takes_any_right_answer():
    """Image 0 prefers text 1, which is right for it; text 0 prefers image 1, for which it is not."""
    image = torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    right = torch.tensor([[True, True], [False, True]])
    assert batch_accuracy(Embeddings(image, text, torch.tensor(1.0)), right).item() == pytest.approx(2 / 4)
