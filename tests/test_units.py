import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.units import Span, human_count, human_time, parse_bytes, parse_span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("4M tok", Span(4_000_000, "tok")),
        ("1.5B tokens", Span(1_500_000_000, "tok")),
        ("1T tok", Span(10**12, "tok")),
        ("8192 tok", Span(8192, "tok")),
        ("1_000 steps", Span(1000, "steps")),
        ("1 step", Span(1, "steps")),
        ("2h", Span(7200, "s")),
        ("90 min", Span(5400, "s")),
        ("1.5h", Span(5400, "s")),
        ("30s", Span(30, "s")),
        ("1e+9 tok", Span(10**9, "tok")),
        ("1E3 steps", Span(1000, "steps")),
        ("2.5E+1k tok", Span(25_000, "tok")),
        ("5000e-3 steps", Span(5, "steps")),
        ("0e99999999 steps", Span(0, "steps")),
    ],
)
def test_quantities_are_parsed(text, span):
    assert parse_span(text) == span


@pytest.mark.parametrize(
    "text", ["4M", "500", "tok", "-3 steps", "1.5 steps", "2 weeks", "", "4 M tok tok", "1e-99999999 tok"]
)
def test_an_ambiguous_quantity_is_rejected(text):
    with pytest.raises(ValueError, match=r"not a quantity|whole number"):
        parse_span(text)


@pytest.mark.parametrize(
    "text", ["1e99999999 tok", "1E+999999999999 s", "9" * 60 + "T tok", "9" * 10**6 + "h"]
)
def test_a_huge_quantity_is_rejected_without_computing_it(text):
    with pytest.raises(ValueError, match=r"too large|too long"):
        parse_span(text)
    with pytest.raises(ValueError, match=r"too large|too long"):
        parse_bytes(text.partition(" ")[0].rstrip("Th") + "MB")


@given(st.text(alphabet="0123456789.eE+-_ kMTtoksephB", max_size=30))
def test_any_text_is_a_quantity_or_a_value_error(text):
    for parse in (parse_span, parse_bytes):
        try:
            parsed = parse(text)
        except ValueError:
            continue
        assert (parsed.amount if parse is parse_span else parsed) >= 0


@given(st.integers(0, 10**15), st.sampled_from(["tok", "steps", "s"]))
def test_a_span_survives_formatting_and_parsing(amount, unit):
    span = Span(amount, unit)
    assert parse_span(str(span)) == span


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("500MB", 500 * 10**6), ("1.5 KiB", 1536)])
def test_byte_sizes_distinguish_binary_and_decimal_units(text, size):
    assert parse_bytes(text) == size


def test_steps_convert_to_tokens_and_wall_time_does_not():
    assert Span(10, "steps").in_tokens(4096) == 40960
    with pytest.raises(ValueError, match="wall time"):
        Span(10, "s").in_tokens(4096)


def test_numbers_are_formatted_short():
    assert human_count(1_234_567) == "1.23M"
    assert human_count(512) == "512"
    assert human_time(7325) == "2:02:05"
