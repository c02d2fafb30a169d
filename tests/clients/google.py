"""Prints what Google's auth library gets from metadata.google.internal."""
import json

import google.auth
from google.auth.compute_engine import _metadata
from google.auth.transport.requests import Request

request = Request()
# Detects the cloud by a header field that only Google sends with `/`. The other ways of detection find nothing here.
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
