"""One token of every row: the memory is written and read in one launch, for decoding."""
