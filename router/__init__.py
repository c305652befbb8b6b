"""The router: it predicts how good the small model's answer would be, and chooses the model by it.

Open `policy.py` first: it turns text and constraints into a `Route`. Terms: quality is that
prediction, and a threshold is what it is compared with. The watch judges an answer while it is held
back. An answer under watch may escalate to the large model.
"""
