"""Prints what Google's auth library gets from metadata.google.internal."""
import json

import google.auth
from google.auth.compute_engine import _metadata
from google.auth.transport.requests import Request

request = Request()
# Requests `/` and expects a header field that only this cloud sends; no other detection applies here.
credentials, project = google.auth.default()
credentials.refresh(request)
print(
    json.dumps(
        {
            "ping": _metadata.ping(request),
            "credentials": type(credentials).__module__,
            "project": project,
            "email": credentials.service_account_email,
            "token": credentials.token,
            "expired": credentials.expired,
        }
    )
)
