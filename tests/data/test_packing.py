"""Document numbers and model inputs against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lrattnres.data.packing import IGNORE, segments, split_windows

SEPARATOR = 9
ROWS = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([0, 1, SEPARATOR]), min_size=width, max_size=width),
        min_size=1,
        max_size=3,
    )
)


@given(ROWS)
def test_a_separator_opens_a_document(rows):
    expected = []
    for row in rows:
        number, numbers = 0, []
        for position, token in enumerate(row):
            number += position > 0 and token == SEPARATOR
            numbers.append(number)
        expected.append(numbers)
    found = segments(torch.tensor(rows), SEPARATOR)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_padding_is_a_separator_to_the_model_and_no_target():
    windows = torch.tensor([[SEPARATOR, 1, 2, SEPARATOR, 3], [2, SEPARATOR, 4, IGNORE, IGNORE]])
    inputs, targets, documents = split_windows(windows, SEPARATOR)
    assert inputs.tolist() == [[9, 1, 2, 9], [2, 9, 4, 9]]
    assert targets.tolist() == [[1, 2, 9, 3], [9, 4, IGNORE, IGNORE]]
    assert documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 2]]
    assert (inputs.dtype, targets.dtype, documents.dtype) == (torch.int64, torch.int64, torch.int32)
    assert windows[1, 3] == IGNORE  # the caller's windows stay as they are
