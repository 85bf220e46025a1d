"""Models whose weights stay packed: modules over packed matrices, and files that hold such."""
