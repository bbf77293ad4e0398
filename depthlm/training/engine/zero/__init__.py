"""The flat partitions of ZeRO 1 to 3: where elements are, matrices across them, and those of other ranks."""
