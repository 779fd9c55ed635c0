from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawhpc.memo import Memo


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=60))
def test_a_memo_never_lies_and_never_holds_more_than_it_may(puts: list[tuple[int, int]]) -> None:
    memo: Memo[int, int] = Memo(100)
    latest: dict[int, int] = {}
    for number, (key, size) in enumerate(puts):
        if size <= 50:
            latest[key] = number
        assert memo.put(key, number, size) == number
        assert sum(entry[1] for entry in memo._young.values()) <= 50
        assert sum(entry[1] for entry in memo._old.values()) <= 50
        assert all(memo.get(key) in (None, latest[key]) for key in latest)


def test_what_is_used_stays_and_what_is_not_goes() -> None:
    memo: Memo[str, int] = Memo(100)
    memo.put("used", 1, 10)
    memo.put("unused", 2, 10)
    for number in range(50):
        memo.put(str(number), number, 10)
        assert memo.get("used") == 1
    assert memo.get("unused") is None
    assert sum(memo.get(str(number)) is not None for number in range(50)) <= 9


def test_what_is_larger_than_half_of_all_is_not_kept() -> None:
    memo: Memo[str, str] = Memo(100)
    memo.put("small", "a", 50)
    assert memo.put("large", "b", 51) == "b"
    assert (memo.get("small"), memo.get("large")) == ("a", None)
