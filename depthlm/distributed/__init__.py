"""Several ranks as one run: launchers, process groups, collectives, signals, watchdog."""
