"""Other packages, in the form in which the benchmarks compare them with ours."""
