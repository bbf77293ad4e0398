"""The commands that are more than a call: training and preparing."""
