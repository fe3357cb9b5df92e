"""Budgets of bits: what is chosen costs no more than anything else that the budget buys."""

import itertools

import pytest

from rotationzoo.calibration.budget import PER_BIT, Place, choose_bits


def cost(places, chosen):
    """What is lost, and the bits that rows of all places take more."""
    lost = sum(
        place.loss * PER_BIT ** (bits / place.dim)
        for place, bits in zip(places, chosen, strict=True)
    )
    return lost, sum(place.heads * bits for place, bits in zip(places, chosen, strict=True))


@pytest.mark.parametrize("extra", [0, 0.1, 0.3, 0.5, 0.9, 1])
def test_no_other_choice_of_the_budget_costs_less(extra):
    places = [Place(0.02, 2, 32), Place(0.003, 2, 32), Place(0.0005, 4, 16), Place(0.002, 2, 64)]
    budget = extra * sum(place.elements for place in places)
    chosen = choose_bits(places, extra)
    lost, spent = cost(places, chosen)
    assert spent <= budget
    others = [
        cost(places, other) for other in itertools.product(*(place.choices for place in places))
    ]
    # The solver stops at a solution within 1e-5 of the best.
    assert lost <= min(lost for lost, spent in others if spent <= budget) * (1 + 1e-4)


def test_rows_get_no_more_than_they_have_room_for():
    assert choose_bits([Place(1, 1, 64), Place(1, 1, 128)], 10) == [64, 128]


def test_bits_that_nobody_needs_more_go_to_losses_too_small_to_measure():
    assert choose_bits([Place(1, 1, 64), Place(0, 1, 64), Place(0.1, 1, 64)], 0.9)[:1] == [64]
    assert sum(choose_bits([Place(1, 1, 64), Place(0, 1, 64), Place(0.1, 1, 64)], 1)) == 3 * 64


def test_a_model_that_loses_nothing_needs_no_choice():
    assert len(choose_bits([Place(0, 1, 64)] * 3, 0.5)) == 3


def test_losses_of_any_size_are_told_apart():
    """Nats a token may be 1e-9, which is below the solver's own tolerances."""
    assert choose_bits([Place(1e-9, 1, 64), Place(1e-12, 1, 64)], 0.5) == [64, 0]
