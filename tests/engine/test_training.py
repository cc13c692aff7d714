"""The recall task's draws, the initializations and the optimizers; the model itself is tested with scale_training."""

import math

import pytest
import torch

from engine.training import D_MODEL, N_ANSWERS, OPTIMIZERS, Sizes, draw_sequences, draw_weights, stream


def test_a_sequence_has_distinct_cues_and_asks_for_the_answer_in_the_slot_of_its_query():
    cues, answers, query, target = draw_sequences(stream(0, "train"), 5, 3, 40)
    assert cues.shape == answers.shape == (3, 40, 5)
    assert query.shape == target.shape == (3, 40)
    for row in cues.flatten(0, 1):
        assert len(set(row.tolist())) == 5
    at_query = cues == query[..., None]
    assert (at_query.sum(dim=-1) == 1).all()
    assert (answers[at_query] == target.flatten()).all()
    assert cues.max() < Sizes(4, 5).n_cues == 10


def test_cues_answers_and_asked_slots_are_uniform():
    n = 20000
    cues, answers, query, target = draw_sequences(stream(1, "train"), 4, n)
    slot = (cues == query[:, None]).int().argmax(dim=-1)
    for drawn, classes in ((cues[:, 0], 8), (answers[:, 2], N_ANSWERS), (target, N_ANSWERS), (slot, 4)):
        counts = drawn.bincount(minlength=classes)
        share = 1 / classes
        assert ((counts - n * share).abs() <= 5 * math.sqrt(n * share * (1 - share))).all()  # binomial


def test_streams_differ_by_seed_and_by_purpose_and_come_again():
    drawn = [
        torch.randn(4, generator=stream(seed, name)) for seed in (0, 1) for name in ("init", "train", "evaluation")
    ]
    assert len({tuple(d.tolist()) for d in drawn}) == 6
    assert torch.equal(drawn[0], torch.randn(4, generator=stream(0, "init")))


@pytest.mark.parametrize(
    ("init", "q_variance", "k_variance"),
    [
        ("unit", 1 / D_MODEL, 1 / D_MODEL),
        ("linear_default", 1 / (3 * D_MODEL), 1 / (3 * D_MODEL)),
        ("normal_002", 4e-4, 4e-4),
        ("folded", 1 / D_MODEL / 512, 1 / D_MODEL),
    ],
)
def test_initial_weights_have_their_variance(init, q_variance, k_variance):
    weights = draw_weights(stream(3, "init"), Sizes(512, 64, 2), init)
    expected = {"W_q": q_variance, "W_k": k_variance, "W_v": 1 / D_MODEL, "W_o": 1 / D_MODEL, "W_u": 1 / D_MODEL}
    expected |= {"E_cue": 1.0, "E_answer": 1.0, "e_query": 1.0}
    assert set(weights) == set(expected)
    for name, variance in expected.items():
        error = variance * math.sqrt(2 / weights[name].numel())  # of a mean square of normal numbers; uniform ones less
        assert abs(weights[name].double().square().mean().item() - variance) <= 5 * error, name
    if init == "linear_default":
        assert weights["W_q"].abs().max() <= 1 / math.sqrt(D_MODEL)
    n_scales = 2  # one per head, beside the weights that are drawn
    assert Sizes(512, 64, 2).n_weights == sum(weight.numel() for weight in weights.values()) + n_scales


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_optimizers_are_pytorchs(kind):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    step = OPTIMIZERS[kind]([ours], 0.05)
    reference = torch.optim.Adam([theirs], 0.05) if kind == "adam" else torch.optim.SGD([theirs], 0.05, momentum=0.9)
    for _ in range(50):
        gradient = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        gradient[0, 0] = 0  # a weight without gradient, as the embedding of a cue that the batch does not show
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        step.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # the same operations in another order
    assert ours[0, 0] == start[0, 0]


def test_adam_takes_a_learning_rate_for_each_model_and_a_new_one_between_steps():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), [w.clone().requires_grad_() for w in start]
    adam = OPTIMIZERS["adam"]([ours], torch.tensor([0.05, 0.2], dtype=torch.float64))
    references = [torch.optim.Adam([weight], rate) for weight, rate in zip(theirs, (0.05, 0.2), strict=True)]
    for step in range(30):
        if step == 10:
            adam.learning_rate = torch.tensor([0.01, 0.02], dtype=torch.float64)
            for reference, rate in zip(references, (0.01, 0.02), strict=True):
                reference.param_groups[0]["lr"] = rate
        ours.grad = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
        adam.step()
        for weight, gradient, reference in zip(theirs, ours.grad, references, strict=True):
            weight.grad = gradient.clone()
            reference.step()
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-12, atol=1e-12)  # the same operations, reordered
