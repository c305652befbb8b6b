"""The gateway: HTTP in, events out; it reads requests, chooses who may answer, limits and counts.

Open `http/server/endpoints.py` first, then `answering/candidates/planner.py`. The objects of one
request are listed in `answering/__init__.py`. Terms: a tier is a model of this gateway's engine or
an upstream one. A candidate may answer a request; a responder does. A tenant is a team or a key.
"""
