"""What a run shows of itself: metrics, trackers, progress, profiles, sublayer norms."""
