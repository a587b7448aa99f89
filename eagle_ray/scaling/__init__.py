"""How many workers a run needs to be done in time: output lengths, work left, and policies. Pure, without a clock."""
