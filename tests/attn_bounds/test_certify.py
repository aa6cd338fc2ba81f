"""Verifier and certify: certificates that hold, counterexamples that replay, radii that are bracketed."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from attn_bounds import (
    Certificate,
    InputError,
    InputSet,
    Property,
    Specification,
    Verifier,
    certified_radius,
    certify,
    pgd,
)
from attn_bounds.verifier import AUTO, OWN_METHODS

from .small_models import DIGITS, digits, linear_model, relu_model, weights

DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
NORMS = (1.0, 2.0, math.inf)
OWN = OWN_METHODS


@pytest.fixture(scope="module")
def vit() -> Verifier:
    return Verifier(DIGITS)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verifier, np.ndarray, np.ndarray]:
    weight, bias = weights(4, 5)
    path = linear_model(tmp_path_factory.mktemp("linear") / "m.onnx", weight, bias)
    return Verifier(path), weight.astype(float), bias.astype(float)


def exact_margins(
    weight: np.ndarray, bias: np.ndarray, x: Tensor, label: int, norm: float, eps: float
) -> Any:
    """Smallest margins of a linear classifier over an lp ball, by class other than the label."""
    rows = weight[label] - np.delete(weight, label, 0)
    values = rows @ x.double().numpy() + bias[label] - np.delete(bias, label)
    return values - eps * np.linalg.norm(rows, DUAL[norm], axis=1)


def onnx_output(path: Path, x: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


# -- margins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", ["crown", "alpha-crown", "stock-crown"])
def test_margins_of_a_linear_model_are_exact(
    linear: tuple[Verifier, np.ndarray, np.ndarray], norm: float, method: str
) -> None:
    verifier, weight, bias = linear
    x = torch.linspace(-1, 1, 5)
    label = int((weight @ x.numpy() + bias).argmax())
    c = certify(verifier, x, label, norm=norm, eps=0.05, method=method, attack=False)
    assert isinstance(c, Certificate)
    expected = exact_margins(weight, bias, x, label, norm, 0.05)
    assert c.rows == [j for j in range(4) if j != label]
    np.testing.assert_allclose(c.margins, expected, atol=5e-3)
    assert (np.array(c.margins) <= expected).all()  # the rounding slack is on the safe side
    assert c.margin == min(c.margins or [])
    assert c.status == ("verified" if c.margin > 0 else "unknown")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", ["ibp", "crown", "alpha-crown", "stock-ibp", "stock-crown"])
def test_no_bound_is_above_what_the_attack_finds(vit: Verifier, norm: float, method: str) -> None:
    eps = {1.0: 0.3, 2.0: 0.2, math.inf: 0.03}[norm]
    x, y = digits(1 if method == "alpha-crown" else 2)
    for sample, label in zip(x, y, strict=True):
        ball, spec = vit.ball(sample, norm, eps), vit.specification(label)
        c = vit.certify_set(ball, spec, method=method, attack=False)
        found = pgd(vit.module, ball, spec, restarts=4, steps=15, stop_early=False)
        assert not (c.verified and found.found)
        if c.margin is None:
            assert method == "stock-ibp"  # 0.3 divides by an interval that holds zero
        else:
            assert c.margin <= found.margin + 1e-6


def test_auto_is_as_good_as_its_stages_and_stops_when_one_suffices(vit: Verifier) -> None:
    x, y = digits(1)
    easy = certify(vit, x[0], y[0], eps=0.005, method="auto")
    assert easy.verified  # type: ignore[union-attr]
    assert [t["method"] for t in easy.tried] == ["attack", "ibp", "sensitivity"]  # type: ignore[union-attr]
    ball, spec = vit.ball(x[0], 2, 0.25), vit.specification(y[0])
    hard = vit.certify_set(ball, spec, method="auto", attack=False)
    margins = [t["margin"] for t in hard.tried]
    assert hard.margin is not None and hard.margin >= max(margins) - 1e-9
    assert [t["method"] for t in hard.tried] == list(AUTO)


def test_the_best_pass_per_row_counts(vit: Verifier) -> None:
    x, y = digits(1)
    ball, spec = vit.ball(x[0], 2, 0.35), vit.specification(y[0])
    c = vit.certify_set(ball, spec, method="sensitivity-alpha", attack=False)
    assert c.status == "unknown" and c.margins is not None and c.won is not None
    (tried,) = c.tried
    names = [p["pass"] for p in tried["passes"]]
    assert names == ["forward", "refined", "alpha"]
    assert tried["seconds"] == pytest.approx(sum(p["seconds"] for p in tried["passes"])) == c.seconds
    found = {name: row[0] for name, row, _ in vit.row_passes([ball], [spec], "sensitivity-alpha")}
    for k, (won, margin) in enumerate(zip(c.won, c.margins, strict=True)):
        best = max(float(row[k]) for row in found.values())
        assert margin == pytest.approx(best) == pytest.approx(float(found[won.split(": ")[1]][k]))
    # decided by the first pass, nothing else runs
    easy = vit.certify_set(vit.ball(x[0], 2, 0.05), spec, method="sensitivity-alpha", attack=False)
    assert [p["pass"] for p in easy.tried[0]["passes"]] == ["forward"]
    assert set(easy.won or []) == {"sensitivity-alpha: forward"}


def test_time_limit_in_the_process_keeps_the_best_so_far(vit: Verifier) -> None:
    x, y = digits(1)
    ball, spec = vit.ball(x[0], 2, 0.35), vit.specification(y[0])
    quick = vit.certify_set(ball, spec, method="sensitivity", attack=False)
    c = vit.certify_set(ball, spec, method="sensitivity-alpha", attack=False, time_limit=1e-3)
    assert [p["pass"] for p in c.tried[0]["passes"]] == ["forward"] and c.margins == quick.margins
    assert c.reason == "bound not positive; time limit of 0.001 s passed"
    none = vit.certify_set(ball, spec, method="auto", attack=False, time_limit=1e-9)
    assert none.margin is None and "time limit" in none.reason and not none.tried


def test_auto_leaves_out_what_a_large_model_has_no_time_or_memory_for(vit: Verifier) -> None:
    numbers, ratio = vit.graph(stock=False).domain().crown_work()
    assert numbers > 0 and ratio > 0
    assert vit.not_worth("crown", 1.0, math.inf) == vit.not_worth("sensitivity-alpha", 1e9, 1.0) == ""
    assert "crown would take about" in vit.not_worth("crown", 10.0, 9.0 * ratio)
    small = Verifier(DIGITS, memory=4.0 * numbers)
    assert "GB" in small.not_worth("alpha-crown", 0.0, math.inf)


def test_batch_equals_loop(vit: Verifier) -> None:
    x, y = digits(3)
    for method in ("ibp", "crown"):
        options = {"norm": 2.0, "eps": 0.1, "method": method, "attack": False}
        loop = vit.certify_inputs(list(x), y, batch=1, **options)  # type: ignore[arg-type]
        begin = time.perf_counter()
        batch = vit.certify_inputs(list(x), y, batch=3, **options)  # type: ignore[arg-type]
        assert 0 < sum(c.seconds for c in batch) <= time.perf_counter() - begin  # they share the time
        for a, b in zip(loop, batch, strict=True):
            np.testing.assert_allclose(a.margins, b.margins, rtol=1e-5)
            assert (a.status, a.rows, a.input_sha256) == (b.status, b.rows, b.input_sha256)


# -- specifications -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ibp", "crown", "sensitivity"])
def test_a_box_between_two_neighbouring_numbers_keeps_both(method: str) -> None:
    """In float32 its middle is one of its ends."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, 1))
    with torch.no_grad():
        module[1].weight.copy_(torch.tensor([[1.0, 0.0]]))
        module[1].bias.fill_(-(2.0**17))
    verifier = Verifier(module, input_shape=(2,))
    for first in (2.0**17, 2.0**17 + 2.0**-6):
        lower = torch.full((1, 2), first)
        upper = torch.nextafter(lower, lower + 1.0)
        spec = Specification(torch.tensor([[1.0], [-1.0]]), torch.zeros(2), ((0,), (1,)))
        found = verifier.row_bounds([InputSet.box(lower, upper)], [spec], method)[0]
        assert found[0] <= float(module(lower)) and -found[1] >= float(module(upper))


@pytest.mark.parametrize("method", ["ibp", "crown", "stock-ibp", "stock-crown"])
def test_radii_of_a_batch_belong_to_its_inputs(method: str) -> None:
    """As many inputs as tokens: a radius must not be taken for one of a token."""
    generator = torch.Generator().manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)).double()
    verifier = Verifier(module, input_shape=(3, 4), dtype=torch.float64)
    points = torch.randn(3, 1, 3, 4, generator=generator).double()
    sets = [InputSet.ball(x, 2.0, eps) for x, eps in zip(points, (0.5, 0.05, 0.005), strict=True)]
    specs = [Specification.classification(0, 2)] * 3
    alone = [verifier.row_bounds([i], [s], method) for i, s in zip(sets, specs, strict=True)]
    assert torch.allclose(verifier.row_bounds(sets, specs, method), torch.cat(alone))


def test_targets_are_those_rows(linear: tuple[Verifier, np.ndarray, np.ndarray]) -> None:
    verifier, _, _ = linear
    x = torch.linspace(-1, 1, 5)
    options = {"norm": 2.0, "eps": 0.1, "method": "crown", "attack": False}
    every = certify(verifier, x, 1, **options)  # type: ignore[arg-type]
    some = certify(verifier, x, 1, targets=[3, 0], **options)  # type: ignore[arg-type]
    assert some.rows == [0, 3]  # type: ignore[union-attr]
    np.testing.assert_allclose(some.margins, [every.margins[0], every.margins[2]], rtol=1e-6)  # type: ignore


def test_top_k_is_the_kth_smallest_margin(linear: tuple[Verifier, np.ndarray, np.ndarray]) -> None:
    verifier, weight, bias = linear
    x = torch.linspace(-1, 1, 5)
    second = int(np.argsort(weight @ x.numpy() + bias)[-2])
    options = {"norm": 2.0, "eps": 0.01, "method": "crown"}
    first = certify(verifier, x, second, **options)  # type: ignore[arg-type]
    assert first.status == "falsified"  # type: ignore[union-attr]
    top2 = certify(verifier, x, second, top_k=2, **options)  # type: ignore[arg-type]
    assert top2.margin == pytest.approx(sorted(top2.margins)[1])  # type: ignore
    assert top2.verified  # type: ignore[union-attr]


@pytest.mark.parametrize("head", ["", "Sigmoid"])
def test_binary_model(tmp_path: Path, head: str) -> None:
    weight, bias = np.array([[1.0, -2.0]], np.float32), np.array([0.5], np.float32)
    path = linear_model(tmp_path / "m.onnx", weight, bias, head=head)
    x = torch.tensor([1.0, 0.0])  # the logit is 1.5, and at l2 distance eps at least 1.5 − √5 eps
    verifier = Verifier(path)
    c = certify(verifier, x, 1, norm=2.0, eps=0.5, method="crown")
    assert isinstance(c, Certificate) and c.verified and c.rows == [0]
    assert c.margin == pytest.approx(1.5 - 0.5 * math.sqrt(5), abs=1e-3)
    wrong = certify(verifier, x, 0, norm=2.0, eps=0.5, method="crown")
    assert isinstance(wrong, Certificate) and wrong.status == "falsified"
    crossed = certify(verifier, x, 1, norm=2.0, eps=0.7, method="crown")
    assert isinstance(crossed, Certificate) and crossed.status == "falsified"
    assert crossed.counterexample is not None
    assert float(onnx_output(path, crossed.counterexample).item()) < (0.5 if head else 0.0)


@pytest.mark.parametrize("head", ["Softmax", "ArgMax"])
def test_heads_are_taken_off(tmp_path: Path, head: str) -> None:
    weight, bias = weights(3, 4)
    x = torch.tensor([0.3, -0.2, 0.5, 0.1])
    label = int((weight @ x.numpy() + bias).argmax())
    path = linear_model(tmp_path / "m.onnx", weight, bias, head=head)
    verifier = Verifier(path)
    assert verifier.head == head and verifier.outputs == 3
    exact = exact_margins(weight.astype(float), bias.astype(float), x, label, math.inf, 0.01)
    c = certify(verifier, x, label, eps=0.01, method="crown")
    assert isinstance(c, Certificate)
    np.testing.assert_allclose(c.margins, exact, atol=5e-3)
    assert c.options["head_taken_off"] == head
    far = certify(verifier, x, label, eps=3.0, method="crown")
    assert isinstance(far, Certificate) and far.status == "falsified" and far.counterexample is not None
    y = onnx_output(path, far.counterexample).flatten()
    assert (y[0] if head == "ArgMax" else y.argmax()) != label


# -- input sets -----------------------------------------------------------------------------------------


def test_mean_and_std_equal_manual_rescaling(tmp_path: Path) -> None:
    weight, bias = weights(3, 8)
    path = linear_model(tmp_path / "m.onnx", weight, bias, shape=(2, 2, 2))
    mean, std = [0.5, 0.4], [0.25, 0.5]
    scale = np.repeat(std, 4)
    pixels = torch.linspace(0.05, 0.95, 8)
    x = (pixels - torch.tensor(mean).repeat_interleave(4)) / torch.tensor(scale).float()
    label = int((weight @ x.numpy() + bias).argmax())
    verifier = Verifier(path, mean=mean, std=std)
    for norm in NORMS:
        c = certify(verifier, x.reshape(2, 2, 2), label, norm=norm, eps=0.02, method="crown", attack=False)
        assert isinstance(c, Certificate)
        centre = exact_margins(weight.astype(float), bias.astype(float), x, label, norm, 0.0)
        rows = (weight[label] - np.delete(weight, label, 0)) / scale
        exact = centre - 0.02 * np.linalg.norm(rows, DUAL[norm], axis=1)
        np.testing.assert_allclose(c.margins, exact, atol=5e-3)
    # the clip range is in pixels, too: every pixel may move by 0.1, but not out of [0, 1]
    c = certify(verifier, x.reshape(2, 2, 2), label, eps=0.1, clip=(0.0, 1.0), method="crown", attack=False)
    assert isinstance(c, Certificate)
    low, high = (pixels - 0.1).clamp(min=0) - pixels, (pixels + 0.1).clamp(max=1) - pixels
    exact = centre + np.minimum(rows * low.numpy(), rows * high.numpy()).sum(1)
    np.testing.assert_allclose(c.margins, exact, atol=5e-3)
    far = certify(verifier, x.reshape(2, 2, 2), label, eps=2.0, method="crown")
    assert isinstance(far, Certificate) and far.status == "falsified" and far.counterexample is not None
    assert onnx_output(path, far.counterexample).argmax() != label  # in the model's units
    assert float((far.counterexample.flatten() - x).abs().div(1 / torch.tensor(scale)).max()) <= 2 + 1e-5


def test_a_property_box_is_not_read_in_pixels(tmp_path: Path) -> None:
    weight, bias = weights(3, 4)
    path = linear_model(tmp_path / "m.onnx", weight, bias)
    box = InputSet.box(torch.zeros(1, 4), torch.ones(1, 4))
    prop = Property("p", ((box, Specification.classification(0, 3)),))
    with pytest.raises(InputError, match="units"):
        Verifier(path, mean=[0.5], std=[0.5]).certify_property(prop)


def test_a_property_speaks_of_the_outputs_behind_the_head(tmp_path: Path) -> None:
    weight, bias = np.array([[2.0, 0.0], [0.0, 2.0]], np.float32), np.array([1.0, 0.0], np.float32)
    path = linear_model(tmp_path / "m.onnx", weight, bias, head="Softmax")
    box = InputSet.box(torch.zeros(1, 2) - 0.1, torch.zeros(1, 2) + 0.1)

    def at_least(p: float) -> Property:  # the first probability, which is between 0.65 and 0.81
        spec = Specification(torch.tensor([[1.0, 0.0]]), torch.tensor([p]), ((0,),))
        return Property("p", ((box, spec),))

    with pytest.raises(InputError, match="behind Softmax"):
        Verifier(path).certify_property(at_least(0.5))
    verifier = Verifier(path, logits=False)
    for method in ("ibp", "crown", "alpha-crown", "sensitivity"):
        c = verifier.certify_property(at_least(0.5), method=method)
        assert c.verified or method == "ibp"
        assert c.margin is not None and c.margin <= 1 / (1 + math.exp(-0.6)) - 0.5
        assert verifier.certify_property(at_least(0.7), method=method).status == "falsified"


def test_clip_shrinks_a_box(linear: tuple[Verifier, np.ndarray, np.ndarray]) -> None:
    verifier, _, _ = linear
    x = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0])
    options = {"eps": 0.1, "method": "crown", "attack": False}
    free = certify(verifier, x, 0, **options)  # type: ignore[arg-type]
    cut = certify(verifier, x, 0, clip=(0.0, 1.0), **options)  # type: ignore[arg-type]
    assert cut.margin > free.margin + 0.01  # type: ignore[union-attr, operator]


# -- counterexamples, properties, radii -----------------------------------------------------------------


def test_a_counterexample_replays(vit: Verifier) -> None:
    x, y = digits(6)
    for norm, eps in ((2.0, 1.5), (math.inf, 0.3), (1.0, 6.0)):
        c = certify(vit, x[5], y[5], norm=norm, eps=eps, method="crown")
        assert isinstance(c, Certificate) and c.status == "falsified" and c.counterexample is not None
        assert c.method == "attack" and not c.verified and c.reason == ""
        z = c.counterexample
        assert onnx_output(DIGITS, z).argmax() != y[5]
        assert float(torch.linalg.vector_norm((z[0] - x[5]).double().flatten(), norm)) <= eps * (1 + 1e-6)


def test_a_property_holds_only_if_every_case_does(vit: Verifier) -> None:
    x, y = digits(2)

    def case(i: int, eps: float) -> tuple[InputSet, Specification]:
        return vit.ball(x[i], math.inf, eps), vit.specification(y[i])

    seen: list[Certificate] = []
    good = Property("good", (case(0, 0.004), case(1, 0.004)))
    assert vit.certify_property(good, method="crown", report=seen.append).verified
    assert [c.status for c in seen].count("verified") == 1 and seen[-1].verified
    assert all(c.margin is None for c in seen[:-1] if "case 1" in c.reason)
    bad = Property("bad", (case(0, 0.004), case(1, 0.5)))
    assert vit.certify_property(bad, method="crown").status == "falsified"
    mixed = Property("mixed", (case(0, 0.04), case(1, 0.004)))
    c = vit.certify_property(mixed, method="ibp", attack=False)
    assert c.status == "unknown" and c.eps == 0.04  # the worse one is reported


def test_radius_of_a_linear_model(linear: tuple[Verifier, np.ndarray, np.ndarray]) -> None:
    verifier, weight, bias = linear
    x = torch.linspace(-1, 1, 5)
    label = int((weight @ x.numpy() + bias).argmax())
    rows = weight[label] - np.delete(weight, label, 0)
    centre = exact_margins(weight, bias, x, label, 2.0, 0.0)
    for norm in NORMS:
        exact = float((centre / np.linalg.norm(rows, DUAL[norm], axis=1)).min())
        r = certified_radius(verifier, x, label, norm=norm, method="crown", tol=0.01)
        assert exact * 0.97 <= r.radius <= exact <= r.attack_radius * (1 + 1e-6)
        assert r.attack_radius <= exact * 1.05


def test_radius_recertifies_and_is_below_the_attack(vit: Verifier) -> None:
    x, y = digits(1)
    spec = vit.specification(y[0])
    seen: list[float] = []
    r = vit.certified_radius(
        x[0], spec, norm=math.inf, method="crown", tol=0.2, restarts=4, steps=15,
        report=lambda s: seen.append(s.radius),
    )  # fmt: skip
    assert 0 < r.radius <= r.attack_radius < math.inf
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == r.radius and len(seen) == r.evaluations + 2
    assert vit.certify_set(vit.ball(x[0], math.inf, r.radius), spec, method="crown").verified
    beyond = vit.certify_set(vit.ball(x[0], math.inf, r.attack_radius * 1.01), spec, method="crown")
    assert not beyond.verified


def test_no_radius_around_a_misclassified_input(linear: tuple[Verifier, np.ndarray, np.ndarray]) -> None:
    verifier, weight, bias = linear
    x = torch.linspace(-1, 1, 5)
    wrong = int((weight @ x.numpy() + bias).argmin())
    r = certified_radius(verifier, x, wrong, method="crown")
    assert r.radius == 0.0 and r.attack_radius == 0.0 and "centre" in r.reason


# -- what is not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*OWN, "stock-crown", "auto"])
def test_nan_weights_are_unknown(tmp_path: Path, method: str) -> None:
    path = relu_model(tmp_path / "m.onnx", nan=True)
    c = certify(path, torch.zeros(4), 0, eps=0.1, method=method)
    assert isinstance(c, Certificate)
    assert c.status == "unknown" and c.margin is None and "NaN" in c.reason
    r = certified_radius(path, torch.zeros(4), 0, method=method)
    assert r.radius == 0.0 and "NaN" in r.reason


def test_an_infinite_bound_is_unknown(tmp_path: Path) -> None:
    verifier = Verifier(relu_model(tmp_path / "m.onnx"))
    huge = certify(verifier, torch.zeros(4), 0, eps=3e38, method="crown", attack=False)
    assert isinstance(huge, Certificate) and huge.status == "unknown" and "infinite" in huge.reason


def test_a_failed_assertion_of_stock_operators_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(relu_model(tmp_path / "m.onnx"))

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError

    monkeypatch.setattr(verifier.graph(True), "compute_bounds", fail)
    monkeypatch.setattr(verifier.graph(False), "compute_bounds", fail)
    c = certify(verifier, torch.zeros(4), 0, eps=0.1, method="stock-crown", attack=False)
    assert isinstance(c, Certificate) and c.status == "unknown" and "NaN or infinite" in c.reason
    with pytest.raises(AssertionError):  # in ours it would be a bug
        certify(verifier, torch.zeros(4), 0, eps=0.1, method="crown", attack=False)


# -- the interface --------------------------------------------------------------------------------------


def test_batch_of_labels_and_torch_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(3, 3)
    labels = module(x).argmax(1)
    found = certify(module, x, labels, eps=1e-3, method="crown")
    assert isinstance(found, list) and [c.verified for c in found] == [True] * 3
    one = certify(module, x[1:2], int(labels[1]), eps=1e-3, method="crown")
    assert isinstance(one, Certificate) and one.margin == pytest.approx(found[1].margin, rel=1e-5)
    assert found[0].input_sha256 != found[1].input_sha256 and found[0].model_sha256 == ""


def test_certificate_as_json_types(vit: Verifier) -> None:
    x, y = digits(1)
    c = certify(vit, x[0], y[0], eps=0.5, method="crown")
    assert isinstance(c, Certificate)
    d = c.as_dict()
    assert d["norm"] == "inf" and d["status"] == "falsified" and len(d["counterexample"]) == 64
    assert replace(c, counterexample=None).as_dict()["counterexample"] is None
    assert {"auto_LiRPA", "torch", "onnxruntime", "python"} <= set(d["versions"])
    assert len(d["model_sha256"]) == 64


def test_bad_arguments(vit: Verifier) -> None:
    x, y = digits(1)
    good: dict[str, Any] = {"eps": 0.1, "method": "ibp"}
    for words, sample, label, options in (
        ("shape", x[0, 0], y[0], good),
        ("NaN", x[0] * math.nan, y[0], good),
        ("label 10", x[0], 10, good),
        ("target 12", x[0], y[0], good | {"targets": [12]}),
        ("cannot be combined", x[0], y[0], good | {"targets": [1], "top_k": 2}),
        ("unknown method", x[0], y[0], good | {"method": "magic"}),
        ("norm", x[0], y[0], good | {"norm": 3.0}),
        ("eps", x[0], y[0], good | {"eps": -0.1}),
        ("eps", x[0], y[0], good | {"eps": math.nan}),
        ("2 inputs but 1 labels", torch.cat([x, x]), [1], good),
    ):
        with pytest.raises(InputError, match=words):
            certify(vit, sample, label, **options)
    with pytest.raises(InputError, match="path"):
        certify(vit, x[0], y[0], timeout=1.0, **good)
    with pytest.raises(InputError, match="input_shape"):
        Verifier(nn.Linear(3, 2))


class Tokens(nn.Module):
    """A row of outputs for every token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_outputs_that_are_no_row_are_flattened(tmp_path: Path) -> None:
    path = tmp_path / "tokens.onnx"
    torch.onnx.export(Tokens().eval(), (torch.zeros(1, 2, 4),), str(path), dynamo=False, opset_version=17)
    verifier = Verifier(path)
    assert verifier.outputs == 6
    x = torch.linspace(-1, 1, 8).reshape(1, 2, 4)
    ball, spec = InputSet.ball(x, 2.0, 0.1), verifier.specification(0)
    best = verifier.certify_set(ball, spec, method="sensitivity", attack=False).margin
    assert best is not None
    for method in ("ibp", "crown", "stock-ibp", "stock-crown"):
        margin = verifier.certify_set(ball, spec, method=method, attack=False).margin
        assert margin is not None and best - 3.0 < margin <= best + 0.1, method
