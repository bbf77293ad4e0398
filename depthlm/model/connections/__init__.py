"""The connections: how sublayers read from the depth stream and write to it. One class per mechanism."""
