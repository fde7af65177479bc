"""Fig. 18: attention through block tables against contiguous memory, and the block size."""
