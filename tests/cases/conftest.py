"""Assertions of what the cases share say what they compared, as those of tests do."""

import pytest

pytest.register_assert_rewrite("case_runs")
