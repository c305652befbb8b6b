"""The exact response cache: equal requests get the first one's answer."""
