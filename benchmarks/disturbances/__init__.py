"""What happens to long runs on purpose: kills, stopped ranks, full disks, and deaths of the tracker's process."""
