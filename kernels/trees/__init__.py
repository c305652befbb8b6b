"""Token trees on the device: grown, selected, verified."""
