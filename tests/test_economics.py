"""The model behind jobs/plan.py: seconds, money, and where they meet."""

from __future__ import annotations

import math

import pytest

from codec.errors import UserError
from pipeline.economics import PREFILL, RAW, Case, Rung, Terms, best, break_even, seconds, weigh

# 1 GB raw in 16 bits a scalar; a strong rung that decodes slowly, a weak one that is quick, one slower than prefilling
CASE = Case(
    2048, 1e9, 16, 10.0, [Rung("strong", 4.0, 6.0, 8.0), Rung("weak", 8.0, 1.0, 1.0), Rung("slow", 2.0, 12.0, 1.0)]
)
GIGABIT = Terms(1e9, storage=0.02, machine=3.6, reuse=100)


def test_seconds_are_fetching_and_decoding() -> None:
    found = {way.name: way.seconds for way in weigh(CASE, GIGABIT)}
    assert found == {PREFILL: 10.0, RAW: 8.0, "strong": 8.0, "weak": 5.0, "slow": 13.0}
    assert best(weigh(CASE, GIGABIT), "time").name == "weak"
    assert best(weigh(CASE, Terms(1e11)), "time").name == RAW
    assert best(weigh(CASE, Terms(1e7)), "time").name == PREFILL


def test_money_is_storage_and_machine_time() -> None:
    ways = {way.name: way for way in weigh(CASE, GIGABIT)}
    assert ways[PREFILL].money == pytest.approx(100 * 10 * 0.001) and ways[PREFILL].stored_bytes == 0
    assert ways[RAW].money == pytest.approx(0.02 + (10 + 800) * 0.001)
    assert ways["weak"].money == pytest.approx(0.01 + (10 + 1 + 500) * 0.001)
    assert best(list(ways.values()), "cost").name == "weak"
    rarely = Terms(1e9, storage=0.02, machine=3.6, reuse=0.5)
    assert best(weigh(CASE, rarely), "cost").name == PREFILL


@pytest.mark.parametrize("name", ["strong", "weak", RAW])
def test_at_the_break_even_both_ways_take_as_long(name: str) -> None:
    found = break_even(CASE, GIGABIT, name)
    assert found.above is not None and seconds(CASE, found.above, name) == pytest.approx(CASE.prefill_seconds)
    if name != RAW:
        assert found.below is not None
        assert seconds(CASE, found.below, name) == pytest.approx(seconds(CASE, found.below, RAW))
    assert found.reuse is not None
    there = {way.name: way.money for way in weigh(CASE, Terms(1e9, 0.02, 3.6, found.reuse))}
    assert there[name] == pytest.approx(there[PREFILL])


def test_what_never_pays_has_no_break_even() -> None:
    found = break_even(CASE, GIGABIT, "slow")
    assert found.above is None and found.reuse is None and found.below == pytest.approx(8 * 0.875e9 / 12)
    assert break_even(CASE, GIGABIT, RAW).below is None
    larger = Case(1, 1e9, 16, 10.0, [Rung("larger", 17.0, 1.0, 1.0), Rung("free", 8.0, 0.0, 0.0)])
    assert break_even(larger, GIGABIT, "larger").below is None
    assert break_even(larger, GIGABIT, "free").below == math.inf


@pytest.mark.parametrize("terms", [Terms(0), Terms(math.inf), Terms(1e9, storage=-1), Terms(1e9, reuse=math.nan)])
def test_numbers_that_cannot_be(terms: Terms) -> None:
    with pytest.raises(UserError):
        terms.check()
    with pytest.raises(UserError, match="not by 'luck'"):
        best(weigh(CASE, GIGABIT), "luck")
