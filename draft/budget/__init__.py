"""How many guesses pay: measured pass times, calibrated acceptance, each request's own pace."""
