"""Who answers a request, models of this machine or servers elsewhere, and when it moves on."""
