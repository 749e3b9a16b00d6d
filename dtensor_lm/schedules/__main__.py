"""`python -m dtensor_lm.schedules` prints all known schedules side by side."""

from dtensor_lm.schedules.comparison import compare, table_text

print("Of the time of all ranks, how much is idle, and the most micro-batches whose activations one rank holds,")
print("with F, I and W equally long, B = I + W, free sends, and two stages per rank where there is a choice.\n")
print(table_text(compare()))
